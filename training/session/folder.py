"""How does a reported folder become one file of a checkpoint, with equal bytes for equal content?"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from penstock.digest import bytes_digest, digest_of
from penstock.errors import CheckpointError

__all__ = ["FOLDER_FILE", "files_in", "folder_digest", "packed_folder", "unpack_folder"]

FOLDER_FILE = "folder.tar"


def files_in(folder: Path) -> dict[str, bytes]:
    """Read every file: relative path -> content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def packed_folder(files: Mapping[str, bytes]) -> bytes:
    """Pack the files as a tar, without times and owners."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def folder_digest(files: Mapping[str, bytes]) -> str:
    """Hash names and contents."""
    return digest_of({name: bytes_digest(content) for name, content in files.items()})


def unpack_folder(content: bytes, folder: Path) -> None:
    """Write the files below `folder`.

    Raises:
        CheckpointError: the tar is damaged, or would write elsewhere.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise CheckpointError(f"{FOLDER_FILE} of a checkpoint cannot be unpacked: {error}") from error
