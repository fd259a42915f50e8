"""Which columns of a shard are not plain numbers? Lists of a length of their own in each row, and images kept as their files.

Both are Arrow extension types: any Arrow reader sees lists, or bytes, and the rest is read from the type's metadata.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import pyarrow as pa

__all__ = ["DTYPES", "ImageType", "RaggedType", "Variable", "as_numbers", "variable_array", "variable_view"]

DTYPES = {
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.uint8(): "uint8",
    pa.uint16(): "uint16",
    pa.uint32(): "uint32",
    pa.uint64(): "uint64",
    pa.float16(): "float16",
    pa.float32(): "float32",
    pa.float64(): "float64",
}
"""What a column's numbers may be: Arrow type to numpy name."""


class Variable:
    """A column whose rows differ in length, as two views: row i is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        offsets: int64 [rows + 1].
        values: [entries], of any dtype; bytes of encoded images are uint8.
    """

    def __init__(self, offsets: np.ndarray, values: np.ndarray) -> None:
        self.offsets, self.values = offsets, values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def copy(self) -> Variable:
        """Copy to memory of its own."""
        return Variable(self.offsets.copy(), self.values.copy())


class RaggedType(pa.ExtensionType):  # type: ignore[misc]
    """Lists of numbers of any length.

    Args:
        value_type: of their entries.
        batch: how a batch holds them; see `penstock.ingest.schema.ColumnInfo.ragged`.
        pad_value: what fills a padded batch.
    """

    def __init__(self, value_type: pa.DataType, batch: Literal["padded", "packed"], pad_value: float) -> None:
        self.batch, self.pad_value = batch, pad_value
        super().__init__(pa.large_list(pa.field("item", value_type, nullable=False)), "penstock.ragged")

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps({"batch": self.batch, "pad_value": self.pad_value}).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> RaggedType:
        return cls(storage_type.value_type, **json.loads(serialized))

    def __eq__(self, other: Any) -> bool:
        return type(other) is RaggedType and _described(self) == _described(other)

    def __hash__(self) -> int:
        return hash(_described(self))


class ImageType(pa.ExtensionType):  # type: ignore[misc]
    """Encoded images that decode to uint8 [height, width, channels].

    Args:
        shape: of the decoded image; it is resized where it has another.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        super().__init__(pa.large_binary(), "penstock.image")

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps({"shape": self.shape}).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> ImageType:
        return cls(tuple(json.loads(serialized)["shape"]))

    def __eq__(self, other: Any) -> bool:
        return type(other) is ImageType and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)


def _described(kind: RaggedType) -> tuple[str, str, float]:
    return str(kind.storage_type), kind.batch, kind.pad_value


for _kind in (RaggedType(pa.int8(), "padded", 0), ImageType((1, 1, 3))):
    pa.register_extension_type(_kind)


def as_numbers(array: pa.Array) -> np.ndarray:
    """Return a primitive array without nulls as numpy sees it, uncopied; Arrow's own `to_numpy` loads pandas, in 0.3 s."""
    values = np.frombuffer(array.buffers()[1] or b"", DTYPES[array.type])
    return values[array.offset : array.offset + len(array)]


def variable_view(array: pa.Array) -> Variable:
    """Return an array of one of the two types as numpy views, without a copy. Offsets need not begin at 0."""
    plain = array.storage
    offsets = np.frombuffer(plain.buffers()[1], np.int64)[plain.offset : plain.offset + len(plain) + 1]
    if isinstance(array.type, ImageType):
        data = plain.buffers()[2]
        return Variable(offsets, np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8))
    return Variable(offsets, as_numbers(plain.values))


def variable_array(kind: RaggedType | ImageType, parts: list[Variable]) -> pa.Array:
    """Put rows of several views together as one array, whose offsets begin at 0 and whose values hold nothing else."""
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.offsets) for part in parts)])
    values = np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in parts])
    offsets = np.cumsum(lengths)
    if isinstance(kind, ImageType):
        storage = pa.LargeBinaryArray.from_buffers(
            kind.storage_type, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        )
    else:
        storage = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)
