"""penstock: from rows in object storage to a trained, registered model.

What a program of your own may import from here; each is loaded on first use, so that `import penstock` takes no time:

    open_feed, FeedDataset    batches of prepared rows, for any training loop (docs/feed.md)
    FeedOptions               what `open_feed` may be given
    log                       chart a value of your own from a recipe or a callback (docs/recipe.md)
    run, load_spec            a pipeline file, run or read (docs/spec.md)
    load_model                a registered model, to be asked for predictions from raw rows (docs/model.md)
    errors                    what the functions above raise
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.flows.spec_file import load_spec
    from penstock.flows.verbs.run import run
    from penstock.ingest.feed.options import FeedOptions
    from penstock.ingest.open_feed import FeedDataset, open_feed
    from penstock.training.own_values import log
    from penstock.training.registry.load import load_model

__version__ = "0.1.0"
__all__ = ["FeedDataset", "FeedOptions", "__version__", "errors", "load_model", "load_spec", "log", "open_feed", "run"]

_PLACES = {
    "FeedDataset": "penstock.ingest.open_feed",
    "FeedOptions": "penstock.ingest.feed.options",
    "open_feed": "penstock.ingest.open_feed",
    "load_model": "penstock.training.registry.load",
    "load_spec": "penstock.flows.spec_file",
    "log": "penstock.training.own_values",
    "run": "penstock.flows.verbs.run",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("penstock.errors")
    if name in _PLACES:
        try:
            return getattr(importlib.import_module(_PLACES[name]), name)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("penstock."):
                raise
            raise ImportError(
                f"penstock.{name}: {__path__[0]} is the copy that a registered model brought along, which predicts only. "
                "Next: import penstock before mlflow.pyfunc.load_model"
            ) from error
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
