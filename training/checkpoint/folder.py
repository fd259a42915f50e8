"""How is a reported folder kept as plain files of a checkpoint, and brought back?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from penstock.digest import digest_of
from penstock.errors import SpecError
from penstock.storage import Storage

__all__ = ["FOLDER", "fetch_folder", "files_in", "folder_digest", "kept_name"]

FOLDER = "folder"
"""The part of a checkpoint that holds what was reported."""


def files_in(folder: Path) -> dict[str, Path]:
    """Return every file, hidden ones too: relative path -> path.

    Raises:
        SpecError: a link leads to a folder or nowhere, so that what it stands for would be missing.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for name, path in paths.items():
        if path.is_symlink() and not path.is_file():
            raise SpecError(
                f"{name!r} in the folder {folder} is a link that does not lead to a file; links to single files alone are kept",
                next_step="put the files themselves into the folder: shutil.copytree copies what a link leads to",
            )
    return {name: path for name, path in paths.items() if path.is_file()}


def kept_name(name: str, separate: Collection[str]) -> str:
    """Return the name in a checkpoint of a reported file; those `separate` lie beside the folder, for a registry."""
    return name if name in separate else f"{FOLDER}/{name}"


def folder_digest(digests: Mapping[str, str]) -> str:
    """Hash the names and the digests of files."""
    return digest_of(dict(digests))


def fetch_folder(files: Storage, names: Iterable[str], into: Path) -> None:
    """Write the files of these names into a local folder, as they were reported.

    Args:
        files: of a checkpoint, or of a registered model.
        names: as of `kept_name`.
    """
    into.mkdir(parents=True, exist_ok=True)
    for name in names:
        target = into / name.removeprefix(f"{FOLDER}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(name, target)
