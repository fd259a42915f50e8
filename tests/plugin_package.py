"""A tiny package as another author's, really built and installed: into a folder that goes on PYTHONPATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"

[tool.setuptools]
py-modules = ["{module}"]

[project.entry-points."{group}"]
{entry}
"""


def install_package(
    folder: Path, group: str, entry: str, source: str, *, name: str = "acme-penstock", version: str = "1.2"
) -> Path:
    """Install a package with one module and one entry point of `group`.

    Args:
        entry: `fastq = "acme_fastq:FastqFormat"`; the module's name is taken from it.
        source: the module's text.

    Returns:
        The folder that holds it: to be put on PYTHONPATH of the processes that shall find it, or on sys.path.
    """
    module = entry.split('"')[1].split(":")[0]
    made, site = folder / "made", folder / "site"
    made.mkdir(parents=True)
    (made / "pyproject.toml").write_text(PROJECT.format(name=name, version=version, module=module, group=group, entry=entry))
    (made / f"{module}.py").write_text(source)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", str(site), str(made)], check=True)
    return site
