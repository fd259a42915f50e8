"""Which files besides Python source count for user code? Those that it, its params or `code.files` name.

A file that counts changes the key with its content, and travels to the workers and into the model registry, unless it is large,
lies outside of the project, or is data that the pipeline reads. Files of secrets are refused.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import Field, field_validator

from penstock.config import OnResume, Section
from penstock.digest import file_digest
from penstock.usercode.source import UserCodeError

__all__ = ["CodeSpec", "content_digest", "matched_files", "named_file", "params_texts", "shipped_data"]

_SHIPPED_BYTES = 16 << 20

_SECRET_FOLDERS = frozenset({".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh"})

_SECRET_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc"),
    *("credentials*", "*credentials.json", "client_secret*", "secrets.*", "service-account*.json", "service_account*.json"),
    *("*.key", "*.pem", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", ".s3cfg", ".boto"),
    *("kubeconfig*", "*.kubeconfig"),
)


class CodeSpec(Section):
    """Files that user code reads by names which only a run knows."""

    files: Annotated[list[str], OnResume.FREE] = Field(default_factory=list)
    """Globs relative to the pipeline file, such as `assets/**`: these files count, and travel, as if code named them."""

    @field_validator("files")
    @classmethod
    def _below_the_pipeline_file(cls, files: list[str]) -> list[str]:
        if outside := [each for each in files if not each or os.path.isabs(each) or ".." in each.split("/")]:
            raise ValueError(f"{outside[0]!r} is not a glob below the folder of the pipeline file; move the files there")
        return files


def matched_files(base_dir: Path, patterns: Iterable[str]) -> list[str]:
    """Return the files that the globs match, as paths relative to `base_dir`, sorted. `*` matches no hidden files."""
    found = {path for pattern in patterns for path in glob.glob(pattern, root_dir=base_dir, recursive=True)}
    return sorted(path for path in found if (base_dir / path).is_file() and "__pycache__" not in path)


def params_texts(params: Any) -> Iterator[str]:
    """Yield the strings in params, each of which may be a path."""
    if isinstance(params, str):
        yield params
    elif isinstance(params, (dict, list, tuple)):
        for value in params.values() if isinstance(params, dict) else params:
            yield from params_texts(value)


def named_file(root: Path, text: str, where: str) -> str | None:
    """Return the file that `text` names: its path in the project `root`, an absolute one outside, None if there is none.

    Args:
        where: the project file that contains the text, for paths relative to it and for the error.

    Raises:
        UserCodeError: it is a file of secrets.
    """
    # False, too, for text that cannot be a path.
    for path in filter(os.path.isfile, (root / text, (root / where).parent / text, (root / where).parent / text.lstrip("/"))):
        file = path.resolve()
        inside = file.is_relative_to(root.resolve())
        name = file.relative_to(root.resolve()).as_posix() if inside else file.as_posix()
        if _is_secret(text) or _is_secret(file.name):
            raise _secret_refused(where, name)
        return name
    return None


def content_digest(file: Path) -> str:
    """Digest a file that counts: by its content, a large one by its size and time."""
    stat = file.stat()
    return file_digest(file) if stat.st_size <= _SHIPPED_BYTES else f"size={stat.st_size} mtime_ns={stat.st_mtime_ns}"


def shipped_data(root: Path, name: str, target: str) -> bytes | None:
    """Return the content of a file that `named_file` has found, None if it does not travel. Raises UserCodeError."""
    file = root / name
    if os.path.isabs(name) or file.stat().st_size > _SHIPPED_BYTES:
        return None
    content = file.read_bytes()
    if b"PRIVATE KEY-----" in content:  # the text form that all tools write, an account's JSON, too
        raise _secret_refused(target, name)
    return content


def _is_secret(path: str) -> bool:
    """Return whether a file of this path usually holds passwords or keys. Python source never counts."""
    *folders, name = PurePath(path.lower()).parts or ("",)
    is_named = not _SECRET_FOLDERS.isdisjoint(folders) or any(fnmatchcase(name, pattern) for pattern in _SECRET_NAMES)
    return is_named and not name.endswith(".py")


def _secret_refused(code: str, file: str) -> UserCodeError:
    return UserCodeError(
        f"{code} names {file}, a file of secrets: what code names travels with it to the workers and into the model registry",
        next_step="read the secret from an environment variable (os.environ), and take the file's name out of the code",
    )
