"""In which pieces are a large file's rows read, so that what is made of them does not show where it was cut?

Pieces begin where a batch of the whole file would: transforms see the same rows together, and sums round alike.
"""

from __future__ import annotations

from itertools import pairwise

from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.read.inspection import PART_BYTES
from penstock.ingest.spec import DataSpec

__all__ = ["Piece", "pieces_of"]

Piece = tuple[int, int]
"""The first row, and the end."""


def pieces_of(data: DataSpec, format: str, file: SourceFile, batch_rows: int, piece_bytes: int = PART_BYTES) -> list[Piece]:
    """Pieces of about `piece_bytes` of the file, in order; none if it is read as a whole, as one of less than twice as much is.

    Args:
        format: that of the snapshot.
        batch_rows: how many rows are read at a time.

    Raises:
        DataError, ServiceError: the file cannot be opened.
    """
    reader = reader_of(data, format)
    rows = file.rows or 0
    if reader.one_row_per_file or file.size_bytes < 2 * piece_bytes:
        return []
    begins = {-(-first // batch_rows) * batch_rows for first, _ in reader.pieces(file, piece_bytes)}
    cut = list(pairwise([*sorted(row for row in begins if row < rows), rows]))
    return cut if len(cut) > 1 else []
