"""What does uv have to be told of pip's settings, which it does not read? A line `NAME=value` for each variable."""

import ast
import os
import subprocess
import sys

# Not extra-index-url: of a version that several indexes have, uv takes the first one's file, and pip the one that fits best.
# One index had soundfile without its library. What is only in an extra index, uv does not find, and pip is asked.
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "no-index": "UV_NO_INDEX",
}


def pip_settings() -> dict[str, str]:
    """Option -> value: of the environment, else of pip's files for `install`, else for all commands."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value for of_section in found.values() for option, value in of_section.items()}


def is_there(place: str) -> bool:
    """Pip passes over folders that are not there; uv fails."""
    path = place.removeprefix("file://")
    return not path.startswith("/") or os.path.exists(path)


for option, value in pip_settings().items():
    if option in NAMES and (places := [place for place in value.split() if is_there(place)]):
        print(f"{NAMES[option]}={(',' if option == 'find-links' else ' ').join(places)}")
