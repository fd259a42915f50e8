"""How large is the product? Lines of the core, of each plug-in and of the tests, and the ten largest files."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("penstock", "ingest", "training", "tasks", "flows")
TEMPLATES = "flows/templates/"


def lines_below(folder: str) -> dict[str, int]:
    """Map the path of each Python file in a folder to its number of lines; links are not followed."""
    paths = sorted(path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: len(path.read_bytes().splitlines()) for name, path in names.items() if not name.startswith(TEMPLATES)}


def report() -> str:
    """Return the table that `make lines` prints."""
    product = {name: lines for folder in PRODUCT for name, lines in lines_below(folder).items()}
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["penstock"]["plugins"]
    of_plugin = {
        plugin: sum(lines for name, lines in product.items() if any(f"{name}/".startswith(f"{place}/") for place in places))
        for plugin, places in plugins.items()
    }
    rows = [
        ("product", sum(product.values())),
        ("core", sum(product.values()) - sum(of_plugin.values())),
        *((f"plug-in {plugin}", lines) for plugin, lines in of_plugin.items()),
        ("tests", sum(lines_below("tests").values())),
        *sorted(product.items(), key=lambda row: -row[1])[:10],
    ]
    return "\n".join(f"{lines:7,}  {name}" for name, lines in rows)


print(report())
