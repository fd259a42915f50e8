"""Tests mirror the packages; `runs` are runs of the command, `conformance` and `drills` what feeds and kills must pass."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
