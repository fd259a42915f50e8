"""Which lines of a pipeline file touch the place where the time goes, and what would each change mean for the weights?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from penstock.errors import SpecError
from penstock.flows.spec_file import LoadedSpec, load_spec
from penstock.flows.verbs.probe.reading import NODE_CACHE, OTHER
from penstock.tasks.spec import PipelineSpec

__all__ = ["ADVICE", "hints"]

HINTS = 3
"""A person tries one after the other; the fourth seldom helps."""

ADVICE = {
    "fetch": "shards come from the store: fewer or larger ones, another order, or a nearer store",
    NODE_CACHE: "the node's cache is smaller than what is read, and shards are fetched again and again: raise "
    "PENSTOCK_CACHE_BYTES or give PENSTOCK_CACHE_DIR a larger disk",
    "read": "files or shards are opened and parsed",
    "decode": "images are decoded while they are read; decode_image: {keep: pixels} with a cache decodes once",
    "transform": "the transforms run while training reads",
    "gather": "rows are copied into batches, from the disk where memory does not hold them",
    "augment": "the recipe's augment: give it fewer operations, or move what is not random to a transform",
    "copy": "batches go to the GPU: smaller dtypes (bytes instead of floats) go faster",
    "tasks": "Ray's tasks prepare the rows of the stream while training reads; a cache prepares them once",
    OTHER: "row numbers are found, batches cut apart and handed over, which costs the same for each batch",
}
"""Place -> what takes the time there."""

_SAME, _BITS = "the same rows in the same order", "the same rows; weights differ in their last bits"
_ORDER, _STEPS = "another order of the rows, so other weights", "larger steps: another training"


def hints(loaded: LoadedSpec, place: str) -> list[dict[str, Any]]:
    """Return at most three changes to try: `set`, texts for `--set`, and `changes`, what they mean for the weights."""
    fitting = ({"set": texts, "changes": changes} for texts, changes in _for_place(loaded.spec, place) if _fits(loaded, texts))
    return [*itertools.islice(fitting, HINTS)]


def _fits(loaded: LoadedSpec, texts: list[str]) -> bool:
    try:
        load_spec(loaded.file, [*loaded.overrides, *texts])
    except SpecError:
        return False
    return True


def _for_place(spec: PipelineSpec, place: str) -> Iterator[tuple[list[str], str]]:
    cache, shuffle, train = spec.materialize.cache, spec.shuffle, spec.train
    by_rows = shuffle.window_of == "rows"
    if cache == "none":
        changes = _SAME if shuffle.mode == "none" else _ORDER  # a stream's windows differ from those of prepared rows
        yield ["materialize.cache=disk"], changes
        yield ["materialize.cache=memory"], changes
        yield [f"train.cpus_per_worker={train.cpus_per_worker / 2:g}"], _BITS
        return
    if place in ("fetch", NODE_CACHE) and cache == "disk":
        if by_rows and shuffle.mode != "none":
            yield ["shuffle.mode=windowed", "shuffle.window_of=shards"], _ORDER
        yield [f"materialize.shard_bytes={spec.materialize.shard_bytes * 4}"], _SAME if by_rows else _ORDER
    if place == "gather" and shuffle.mode == "global":
        yield ["shuffle.mode=windowed"], _ORDER
    if place in ("fetch", "gather", "read") and cache == "disk":
        yield ["materialize.cache=memory"], _SAME
    if place not in ("copy", NODE_CACHE):
        yield [f"train.workers={train.workers * 2}"], _BITS
    if place in (OTHER, "copy", "tasks"):
        yield [f"train.batch_rows={train.batch_rows * 4}"], _STEPS
