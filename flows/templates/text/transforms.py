"""Text to numbers."""

import numpy as np

ALPHABET = 128
"""Tokens are ASCII codes, 0 to 127."""

UNKNOWN = ord("?")
"""Stands for every character outside ASCII."""


def to_tokens(batch):
    """Turn the column `text` into `tokens`: one ASCII code (uint8) per character.

    penstock calls this with a batch of rows, as a dict of column name to numpy array, and keeps the columns it returns.
    Every row must come out with the same shape: `data.text.rows: chunk` cuts the text into rows of equal length.
    """
    codes = [np.fromiter(map(ord, text), dtype=np.uint32, count=len(text)) for text in batch["text"]]
    tokens = np.stack(codes)
    return {"tokens": np.where(tokens < ALPHABET, tokens, UNKNOWN).astype(np.uint8)}
