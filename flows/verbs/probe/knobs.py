"""Which lines of a pipeline file may make reading faster? Those that touch where the time goes come first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from penstock.flows.verbs.probe.measure import NODE_CACHE, OTHER
from penstock.tasks.spec import PipelineSpec

__all__ = ["ADVICE", "EFFECTS", "Knob", "Surroundings", "knobs"]

Effect = Literal["none", "bits", "order", "training"]

EFFECTS: dict[Effect, str] = {
    "none": "training sees the same rows in the same order",
    "bits": "the same rows in the same order; sums are taken in another one, so weights differ in their last bits",
    "order": "another order of the rows, so other weights",
    "training": "steps of another size: another training",
}
"""What a change means for the weights."""

ADVICE = {
    "fetch": "bytes come from the store; fewer or larger shards, another order, or a store that is nearer",
    NODE_CACHE: "the node's cache is smaller than what is read, and shards are fetched again and again: raise "
    "PENSTOCK_CACHE_BYTES, give PENSTOCK_CACHE_DIR a larger disk, or read a window of shards at a time (shuffle.window_of: "
    "shards)",
    "read": "files or shards are opened and parsed; materialize.cache: disk parses the source once",
    "decode": "images are decoded while they are read; materialize.cache: disk with pixels (decode_image: keep: pixels) "
    "decodes once",
    "transform": "the transforms run while training reads; materialize.cache: disk or memory runs them once",
    "gather": "rows are copied into batches, and page by page from the disk where the memory does not hold them: the memory's "
    "own rate is the limit; more workers, or shuffle.mode: windowed for data that memory does not hold",
    "augment": "the recipe's augment; give it fewer operations, or do what needs no chance in a transform",
    "copy": "batches go to the GPU; smaller dtypes (bytes instead of floats) go faster",
    "tasks": "Ray's own work between the tasks of the stream; materialize.cache: disk or memory needs none while training "
    "reads",
    OTHER: "finding row numbers, cutting and handing over batches: it costs the same for each, so larger batches "
    "(train.batch_rows) cost less a row",
}
"""Place -> what it is, and what to do about it."""

_BY_PLACE = {
    "fetch": ("cache", "window_of", "shard_bytes", "mode", "workers"),
    NODE_CACHE: ("window_of", "mode", "window_rows", "shard_bytes", "cache"),
    "gather": ("mode", "workers", "batch_rows", "cache"),
    OTHER: ("batch_rows", "workers", "cache"),
}
"""Place -> the knobs that touch it; for other places `_FIRST`."""

_FIRST = ("cache", "cpus", "unit_bytes", "workers", "batch_rows")

MEMORY_SHARE = 0.3
"""`cache: memory` is tried where rows take at most this share of the object store: more would be spilled to disk."""


class Knob(NamedTuple):
    """One change to try."""

    values: dict[str, Any]
    effect: Effect


class Surroundings(NamedTuple):
    """What a pipeline is read in."""

    cpus: float
    object_store_bytes: float
    remote: bool
    """Whether the storage is on no disk of this machine."""
    rows_bytes: int
    """About what the prepared rows take."""
    beyond_memory: bool


def knobs(spec: PipelineSpec, place: str, around: Surroundings) -> list[Knob]:
    """What to try, the likeliest first. All of them fit the file, taken one at a time."""
    by_name = dict[str, list[Knob]]()
    for name, knob in _all(spec, around):
        by_name.setdefault(name, []).append(knob)
    first = _BY_PLACE.get(place, _FIRST)
    return [knob for name in (*first, *(by_name.keys() - set(first))) for knob in by_name.get(name, ())]


def _all(spec: PipelineSpec, around: Surroundings) -> Iterator[tuple[str, Knob]]:
    cache, shuffle, train = spec.materialize.cache, spec.shuffle, spec.train
    if cache != "disk":
        # The windows of a stream are others than those of rows that lie somewhere.
        yield "cache", Knob({"materialize.cache": "disk"}, "order" if cache == "none" and shuffle.mode != "none" else "none")
    fits = around.rows_bytes <= MEMORY_SHARE * around.object_store_bytes
    if cache != "memory" and fits and shuffle.window_of == "rows" and not spec.evaluate.slices:
        yield "cache", Knob({"materialize.cache": "memory"}, "order" if cache == "none" and shuffle.mode != "none" else "none")
    if cache == "none":
        yield "cpus", Knob({"train.cpus_per_worker": train.cpus_per_worker / 2}, "bits")
        yield "unit_bytes", Knob({"materialize.unit_bytes": max(1, spec.materialize.unit_bytes // 4)}, "none")
    if cache == "disk" and around.remote:
        if shuffle.mode != "none" and shuffle.window_of == "rows" and shuffle.sample is None:
            yield "window_of", Knob({"shuffle.mode": "windowed", "shuffle.window_of": "shards"}, "order")
        for size in (spec.materialize.shard_bytes * 4, spec.materialize.shard_bytes // 4):
            yield "shard_bytes", Knob({"materialize.shard_bytes": size}, "none" if shuffle.window_of == "rows" else "order")
    if shuffle.mode == "global" and shuffle.sample is None and (around.remote or around.beyond_memory):
        yield "mode", Knob({"shuffle.mode": "windowed"}, "order")
    if shuffle.mode == "windowed":
        yield "window_rows", Knob({"shuffle.window_rows": shuffle.window_rows * 4}, "order")
    doubled = train.workers * 2
    if doubled * train.cpus_per_worker <= around.cpus and not train.batch_rows % doubled and cache != "none":
        yield "workers", Knob({"train.workers": doubled}, "bits")
    yield "batch_rows", Knob({"train.batch_rows": train.batch_rows * 4}, "training")
