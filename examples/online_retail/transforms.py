"""An invoice line as numbers."""

import re
import zlib

import numpy as np

WORDS = 512
"""Words of the description are hashed to numbers below this; 0 means no word."""

MAX_WORDS = 8


def describe_line(batch):
    """Turn the columns of the CSV into what the transforms after this one need.

    `batch` maps column names to numpy arrays; a number column with gaps has NaN, a text column has None. Rows whose `_keep` is
    false are left out, and counted.
    """
    price, quantity = batch["UnitPrice"].astype(float), batch["Quantity"].astype(float)
    minutes = batch["InvoiceDate"].astype("datetime64[m]").astype(np.int64)
    cancelled = [str(number).startswith("C") for number in batch["InvoiceNo"]]
    return {
        "cancelled": np.array(cancelled, dtype=np.int64),
        "price": np.log1p(price.clip(min=0)),
        # Without its sign: a negative quantity is what makes a cancellation, and would give the answer away.
        "quantity": np.log1p(np.abs(quantity)),
        "hour": (minutes // 60 % 24).astype(float),
        "weekday": ((minutes // (60 * 24) + 3) % 7).astype(float),
        "known_customer": (~np.isnan(batch["CustomerID"].astype(float))).astype(np.float32),
        "country": batch["Country"],
        "words": np.stack([hashed_words(text) for text in batch["Description"]]),
        # Lines without a price are corrections of the stock, not sales.
        "_keep": price > 0,
    }


def hashed_words(text) -> np.ndarray:
    """The first words of a description as numbers, int64 [MAX_WORDS]. Python's hash() differs between processes."""
    words = re.findall(r"[a-z]+", (text or "").lower())[:MAX_WORDS]
    numbers = np.zeros(MAX_WORDS, dtype=np.int64)
    numbers[: len(words)] = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return numbers
