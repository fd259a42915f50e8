"""Where is penstock installed, and which versions of other packages does code use?"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path

from penstock.digest import digest_of, file_digest

__all__ = ["ENVIRONMENT", "IMPORT_ROOT", "PACKAGE_DIR", "describe_environment", "version_of", "versions_of"]

PACKAGE_DIR = Path(__file__).resolve().parent
"""The folder of the package `penstock`, which holds all others."""
IMPORT_ROOT = PACKAGE_DIR.parent
"""The folder that `penstock` is imported from: a checkout or site-packages."""
ENVIRONMENT = "environment.txt"
"""File of the text of `describe_environment`, in a run's folder and at its tracker."""


def version_of(name: str) -> str:
    """Return the version of a distribution; "absent" if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return "absent"


def versions_of(packages: set[str]) -> dict[str, str]:
    """Return distribution -> version for top-level modules; of one without a distribution, module -> digest of its sources."""
    versions: dict[str, str] = {}
    for top in sorted(packages - sys.stdlib_module_names - set(sys.builtin_module_names)):
        names = {name for name in _distributions().get(top, ()) if name}
        for name in sorted(names):
            # Looked up by name: an upgrade that was cut off leaves a folder `~umpy-...` with another version.
            found = distribution(name)
            versions[name] = found.version
            if _is_editable(found) and (source := _source_digest(top)):
                # As a local version, which a requirement leaves out: `pip install -e` keeps the number at every edit.
                versions[name] += f"+{source.replace(':', '.')}"
        if not names and (source := _source_digest(top)):
            versions[top] = source
    return versions


@functools.cache
def describe_environment() -> str:
    """Describe Python, platform and the installed distributions, one `name==version` a line."""
    found = (distribution.metadata for distribution in distributions())
    lines = sorted({f"{metadata['Name']}=={metadata['Version']}" for metadata in found}, key=str.lower)
    return "\n".join([f"# Python {platform.python_version()} on {platform.platform()}", *lines]) + "\n"


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def _is_editable(found: Distribution) -> bool:
    """Return whether it is installed as a link to its sources (PEP 610)."""
    with contextlib.suppress(ValueError, AttributeError):
        return bool(json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))
    return False


@functools.cache
def _source_digest(top: str) -> str:
    """Digest the sources of a module, such as one on PYTHONPATH; empty if it cannot be found."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    roots = [Path(root) for root in spec.submodule_search_locations or []]
    files = [(p.relative_to(root).as_posix(), p) for root in roots for p in sorted(root.rglob("*.py"))]
    if not roots and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).name, Path(spec.origin))]
    return "source:" + digest_of([[name, file_digest(file)] for name, file in files]) if files else ""
