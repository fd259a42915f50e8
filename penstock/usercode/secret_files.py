"""Which files never travel with code, because they hold secrets?

What code names travels to the workers and, with the model, into a registry that others read.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import PurePath

__all__ = ["holds_private_key", "is_secret_file"]


_FOLDERS = frozenset({".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh"})

_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc"),
    *("credentials*", "*credentials.json", "client_secret*", "secrets.*", "service-account*.json", "service_account*.json"),
    *("*.key", "*.pem", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", ".s3cfg", ".boto"),
    *("kubeconfig*", "*.kubeconfig"),
)


def is_secret_file(path: str) -> bool:
    """Whether a file of this path usually holds passwords or keys. Python source never counts: it is imported, not read."""
    *folders, name = PurePath(path.lower()).parts or ("",)
    if name.endswith(".py"):
        return False
    return not _FOLDERS.isdisjoint(folders) or any(fnmatchcase(name, pattern) for pattern in _NAMES)


def holds_private_key(content: bytes) -> bool:
    """Whether a file holds a private key in the text form that all tools write, as an account's JSON does, too."""
    return b"PRIVATE KEY-----" in content
