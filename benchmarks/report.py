"""Turns the numbers of benchmarks/results into docs/performance.md and its picture.

python -m benchmarks.report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS, DOCS = Path("benchmarks/results"), Path("docs")
OURS, BASE, OTHERS = "#1b62a5", "#444444", "#b8c4d0"
GATHER = "numpy gather"

PAGE = """\
# Performance

Made by `make bench`; every number here comes from `benchmarks/results/`. A ratio compares two programs
within one round of one run; the table shows the median over the rounds. Rates belong to the machine that a section names.

{machine}

## The feed

How many rows a second does each loader deliver, as shuffled batches of 256 rows in torch tensors? One consumer process reads
all rows, or two read half of the rows each.

Everything is compared with *numpy's gather*: `array[row_ids]` on a memory-mapped array, into a fresh tensor for each batch.
That is the shortest program that shuffles, and no limit: a loader that touches memory in a better order is faster. The memory's
own rate stands beside it: *numpy copy in order* copies neighbouring rows and shuffles nothing.

- The consumers do nothing with their batches. penstock notices that and gathers without its thread; "always a thread" shows
  what the thread would cost.
- In the first round a whole epoch of every contender but Ray's was checked: each row came once.
- These rows are of before `shuffle.lanes`. Lanes beside one lane, in the same rounds (2026-11-28, AMD EPYC): of the table 0.97
  with one consumer and 1.02 with two (global), 0.94 and 1.19 (windowed); of images 0.99 and 1.22, 0.96 and 1.05.
- The contenders do not promise the same. penstock's global order continues exactly at any batch on any number of ranks.
  LitData, WebDataset and Ray's local shuffle mix rows of one shard or buffer only. "numpy take into a reused buffer" hands out
  the same memory for every batch.
- Settings are in `benchmarks/loaders/`. MosaicML Streaming and Hugging Face datasets need different versions of
  huggingface_hub, so `make bench` gives MosaicML its own environment.
- WebDataset is left out of the table: nobody stores a row of 112 bytes as one file of an archive.

![Rows per second beside numpy's gather](images/feed.png)
"""

LOOP = """\
## The training loop

Two processes train a small network (28-256-256-2, AdamW, DDP with gloo) on shuffled batches of {batch_rows:,} rows,
{rounds} rounds of {steps:,} steps. By hand: tensors in memory, nothing logged, nothing saved. penstock reads its feed, sends
loss, learning rate and times of every step, and can be continued exactly. (Ratios are
medians of those inside each round, which the medians of the rows beside them need not give.)
Making and packing what is logged of every step takes
{logging_percent:.1f} % of rank 0's time. The feed gathers in a thread of its own, beside the steps.

Checkpoints are written by a thread of rank 0, beside the steps: one every 10 s costs less than 2 %.
"""

SCALE = """\
## A million shards, a thousand ranks

Does anything grow with shards, ranks or runs? Shards have a million rows, so the right column is 10^12 rows; a feed is that of
the last of 1,024 ranks, each with 256 rows of a step. Contents are faked: all shards are one file, and a store makes up what it
lists, without a network. All else is what a run does. Each figure is of a process of its own; seconds are CPU seconds, measured
beside other work. `plan` checks every shard in the store, as a run that reuses them does; a listing of a store has 1,000 names
a request. Requests of a rank are counted over whole epochs of shards of 16 rows: one for each shard of its lanes, and two to
open. The reused run of a million files is of 2026-11-29, 2 cores that had four times as much to do as they could; the code
before took 136 s and 3,324 MB in the same hour, while they had up to eight times as much.
"""

PREPARE = """\
## Preparing rows

{rows:,} rows of 28 float32 columns and a label in 8 Parquet files: learn mean and deviation, scale, join, write Arrow files,
with two processes that run already, {rounds} rounds. penstock also looks for missing and infinite values, assigns splits,
describes every column, hashes what it writes, and commits each unit to disk; by hand the files need not be on disk.
"""

TEXT = """\
### {title}

{rows:,} rows of the same columns in 8 files, {rounds} rounds. penstock parses them once: the look that settles on types
keeps the rows on the node's disk until they are prepared. By hand the first rows give the types, and all is parsed twice.
"""

ONE_FILE = """\
### One large file

{rows:,} rows in one Parquet file beside the same rows in eight, {rounds} rounds.
"""

IMAGES = """\
### JPEG files

{rows:,} files of 500 x 375 pixels, {mb} MB, to uint8[224, 224, 3], {rounds} rounds. penstock also hashes what it reads and
writes, sees that every file is a whole picture, and commits each unit.
"""

LARGE = """\
To the first step of a small network on two workers, {rounds} rounds:

| | seconds (median) |
|---|---|
| a new project, 1,000 rows of CSV | {median[start]:.1f} |
| a new project, {csv_mb} MB of CSV | {median[csv]:.1f} |
| a program by hand that prepares these {csv_mb} MB: pyarrow in two processes | {median[by hand]:.1f} |
| 16 MB of rows that are prepared already | {median[small]:.1f} |
| {gigabytes} GB of rows that are prepared already | {median[large]:.1f} |

What the CSV adds to the start is {csv_of_by_hand:.2f} of what the program takes; {gigabytes} GB begin {large_adds_s:.1f} s
later than 16 MB (medians over the rounds).
"""

MEMORY = """\
Peak memory of a process that learns, scales, joins and writes one file, all of penstock's libraries included:
"""

GROWTH = """\
## Growth

Microseconds of a batch of 256 rows (one int64 column, global order, rows in memory), {rounds} rounds, and of finding the row
ids alone. A small dataset pays for beginning its epochs; a large one for memory that is in no cache of the processor.
"""

BEYOND = """\
## Beyond memory

{data_mb:,} MB of rows on the local disk, read by one process that may have {limit_mb:,} MB for itself and the pages it reads,
{rounds} rounds, nothing in memory at first.
"""

RAY_LOOP = """\
## A function of Ray Train: {table}

{rows:,} rows of the feed's tables above, {rounds} rounds. One training function on two workers, which does nothing with its
batches of 256: with Ray Data's shard under TorchTrainer, shuffled in a local buffer of 10,000 rows, and as `train.loop`, with
penstock's shard in its global order.
"""

GPU = """\
## A GPU

{gpu}: a small convolutional network learns from shuffled batches of {batch_rows:,} images of bytes that become floats there,
{rounds} rounds of {steps:,} steps. The ratio is the share of the time that the GPU is busy.
"""

GPU_LOOP = """\
### Checkpoints of a GPU

{gpu}: penstock's loop trains a network of 23 million weights on batches of {batch_rows:,} images,
{rounds} rounds of {steps:,} steps. Of a checkpoint, 275 MB, the GPU writes the copy into pinned memory while the training
thread goes on, and another thread writes the files. A save holds the training thread for {save_ms:.1f} ms, and one every
{every} steps makes training {checkpoint_percent:.1f} % longer.
"""

BOOSTED = """\
## Boosted trees: {library}

{rows:,} rows of 28 columns, two classes, {trees} trees, {rounds} rounds. By hand: the library's own `train`, two threads.
In the pipeline: one worker with two threads, and two workers with one. All measure the training loss after every tree; what
is timed is from the end of the first tree to that of the last.
"""

FRAMEWORKS = """\
## The same rows under each framework

Two tasks, one worker with two cores, {rounds} rounds. *tumours*: scikit-learn's breast cancer, 569 rows, 30 columns.
*cancelled*: which lines of a shop's invoices are cancellations, Online Retail, trained on those before August 2011 and tested
on those from September on. The networks are one hidden layer of 64, the trees the libraries' common settings; nothing is tuned.
Learning is from the first step on record to the last; the stage has the framework's start, too. Lines are those that the user
writes: the model's file and `train:`.
"""

PREDICT = """\
## Scoring

`penstock predict` on {rows:,} rows of 30 numbers in 16 Parquet files, with the model of the tabular template, beside a loop by
hand with the same network in two warm processes. Timed is from the first unit that begins to the last that is committed.
"""

RAW_ROWS = """\
## Raw rows of a registered model

{rows:,} rows of 30 numbers, the transforms of the tabular template, {rounds} rounds, one process. Materialize reads Parquet,
prepares, hashes and writes shards. A model reads the same files, compares columns and types with those it was trained on, and
prepares the rows for its network.
"""

ONE_ROW = """\
One row of that template, from what a caller gives to what the network takes, median of {requests:,} requests
(2026-11-28, beside other work):
"""

START = """\
## Start

From the command to the first optimizer step of the tabular template on two workers, and for the last line to the command's end,
{rounds} rounds. By hand: a script that reads the same rows and trains the same network with Ray Train, and records nothing.
"""

TUNE = """\
### Wide and heavy rows

A worker holds its libraries (280 MB), its model, and of the feed at most four batches: one in use, one being filled, two
gathered ahead (`GROUP_BYTES`, 4 MB, for smaller ones). The shards themselves are mapped: those pages the kernel takes back.
Measured over `open_feed` with rows of 140 MB (`float64[17500000]`), 2026-11-28, AMD EPYC, private memory above the libraries:

| batch_rows | a consumer that only reads | a consumer that works between batches |
|---|---|---|
| 1 | 1.96 batches (274 MB) | 3.91 batches (547 MB) |
| 2 | 1.95 batches (547 MB) | 3.91 batches (1,094 MB) |
| 4 | 1.95 batches (1,094 MB) | |

A task that prepares such rows holds one of them at a time, whatever the file and its row groups are (of Parquet, a page): about
ten times its bytes, eight of which are Parquet's for decoding a list. 12 rows of 70 MB (`float32[17500000]`) in one row group,
dealt to splits by their hash, took 725 MB and 14 CPU seconds above the libraries (2,389 MB and 47 s while row groups were read
ahead and rows hashed whole; 2026-11-29, 2 cores, busy). As many tasks run at once as there are CPUs; `prepare.memory` and
`prepare.concurrency` limit them.

So a training worker needs its libraries, its model and four times its rows of a batch; a preparing task its libraries and the
larger of 768 MB and ten rows. Neither grows with files or rows. The command tries a row of each of up to eight files, and gives
the model up to four rows before it is registered. Whole runs of the command with one worker (rows of 70 MB in three files, one
a step; the others with a scaler, a concatenator and a label encoder), and the most private memory of a process, its libraries
included; 2026-11-29, 2 cores, busy:

| | 12 rows of 70 MB | 20,000 rows of 5,000 columns, 1,000 classes |
|---|---|---|
| `read` to `register` | 94 s | 160 s |
| `materialize` | 29.2 s | 44.0 s |
| `train`, two epochs | 9.5 s | 33.6 s |
| `evaluate` | 3.3 s | 6.2 s |
| `register` | 15.1 s | 15.5 s |
| the command | 2,049 MB | 1,338 MB |
| a preparing task | 771 MB | 945 MB |
| the training worker | 991 MB | 639 MB |

## Sweeps

{trials} trials of the tabular template with {hidden:,} hidden units, {epochs} epochs of 11 steps each, one worker a
trial, two at once. By hand: the same trainings, with validation and checkpoints, in two processes that have torch loaded. It
is timed from the begin of the first trial to the end of the last; the start of the cluster is left out. The weights of all
trials are the same.
"""

FIRST_BATCH = """\
A worker that is up and opens its share of prepared rows, those of the feed's tables above, has its first batch after
{times}, the pages in memory as a run before has left them.
"""


def main() -> None:
    """Write the page and the picture from the newest results."""
    feed = json.loads((RESULTS / "feed.json").read_text())
    lines = [PAGE.format(machine=_machine(feed["machine"]))]
    for name, table in feed["tables"].items():
        lines += [
            f"### {name}: {table['rows']:,} rows of {table['row']}, {feed['rounds']} rounds of {feed['seconds']:g} s",
            "",
            "| contender | rows/s, 1 consumer | of numpy's gather | rows/s, 2 consumers | of numpy's gather |",
            "|---|---|---|---|---|",
            *[_row(contender, found) for contender, found in _ranked(table)],
            "",
            *[f"{who} is left out: {why}\n" for who, why in table["left_out"].items()],
            *[f"{who}: measured in a run of its own on {date}.\n" for who, date in table.get("measured_later", {}).items()],
        ]
    lines += _section("beyond", BEYOND, "rows/s", "rows_per_s", "of numpy's gather")
    lines += _section("loop", LOOP, "rows/s", "rows_per_s", "of by hand")
    for name in ("images", "table"):
        lines += _section(f"ray_loop_{name}", RAY_LOOP, "rows/s", "rows_per_s", "of Ray Data, materialized")
    lines += _section("gpu", GPU, "rows/s", "rows_per_s", "busy")
    lines += _section("gpu_loop", GPU_LOOP, "rows/s", "rows_per_s", "of none")
    lines += _section("prepare", PREPARE, "rows/s", "rows_per_s", "of by hand") + _memory()
    for title, name in (("CSV", "prepare_csv"), ("JSON lines", "prepare_json")):
        lines += _section(name, TEXT.replace("{title}", title), "rows/s", "rows_per_s", "of pyarrow by hand")
    lines += _section("prepare_one", ONE_FILE, "rows/s", "rows_per_s", "of eight files")
    lines += _section("prepare_images", IMAGES, "files/s", "rows_per_s", "of Pillow by hand")
    lines += _section("predict", PREDICT, "rows/s", "rows_per_s", "of by hand")
    lines += _section("raw_rows", RAW_ROWS, "rows/s", "rows_per_s", "of materialize") + _one_row()
    for library in ("xgboost", "lightgbm"):
        lines += _section(f"boosted_{library}", BOOSTED, "seconds", "seconds", "by hand = 1")
    lines += _frameworks()
    lines += _section("start", START, "seconds", "seconds", "by hand = 1") + _first_batch() + _large() + _growth() + _scale()
    lines += _section("tune", TUNE, "seconds", "seconds", "by hand = 1")
    (DOCS / "performance.md").write_text("\n".join(lines).rstrip() + "\n")
    _draw(feed)


def _section(name: str, text: str, unit: str, values: str, ratio: str) -> list[str]:
    """One benchmark whose variants are compared with the first of them; nothing where it has not been run."""
    found = _read(name)
    if found is None:
        return []
    rows = [
        f"| {who} | {_short(one['median'])} | {' to '.join(_short(end(one[values])) for end in (min, max))} | "
        f"{_short(one['of_by_hand'])} |"
        for who, one in found["variants"].items()
    ]
    head = [f"| | {unit} (median) | spread | {ratio} |", "|---|---|---|---|"]
    return [text.format(**found), _machine(found["machine"]), "", *head, *rows, ""]


def _frameworks() -> list[str]:
    found = _read("frameworks")
    if found is None:
        return []
    head = ["| task | framework | AUROC | accuracy | learning, s | stage, s | lines |", "|---|---|---|---|---|---|---|"]
    rows = [
        f"| {task} | {way} | {one['auroc']:.4f} | {one['accuracy']:.4f} | {_short(one['seconds'])} | "
        f"{_short(one['stage_s'])} | {one['lines']} |"
        for task, ways in found["tasks"].items()
        for way, one in ways.items()
    ]
    return [FRAMEWORKS.format(**found), _machine(found["machine"]), "", *head, *rows, ""]


def _short(number: float) -> str:
    """Three digits that count, and all those before the point."""
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def _memory() -> list[str]:
    found = _read("prepare")
    if found is None:
        return []
    rows = [f"| {int(rows):,} | {peak:,.0f} |" for rows, peak in found["peak_mb"].items()]
    return [MEMORY, "| rows of the file | MB |", "|---|---|", *rows, ""]


def _one_row() -> list[str]:
    found = _read("raw_rows")
    if found is None:
        return []
    rows = [f"| {form} | {one['median']:.2f} |" for form, one in found["one_row_ms"].items()]
    return [ONE_ROW.format(**found), "| given as | ms |", "|---|---|", *rows, ""]


def _first_batch() -> list[str]:
    found = _read("start")
    if found is None:
        return []
    times = " and ".join(f"{one['median']:,.0f} ms ({name})" for name, one in found["first_batch"].items())
    return [FIRST_BATCH.format(times=times)]


def _large() -> list[str]:
    found = _read("large")
    return [] if found is None else [LARGE.format(**found), _machine(found["machine"]), ""]


def _read(name: str) -> dict[str, Any] | None:
    """A benchmark's newest result; None where it has not been run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _growth() -> list[str]:
    found = _read("growth")
    if found is None:
        return []
    rows = [
        f"| {int(size):,} | {one['feed']['median']:,.1f} | {one['order']['median']:,.1f} |"
        for size, one in found["sizes"].items()
    ]
    head = ["| rows | feed | order alone |", "|---|---|---|"]
    return [GROWTH.format(**found), _machine(found["machine"]), "", *head, *rows, ""]


def _scale() -> list[str]:
    found = _read("scale")
    if found is None:
        return []
    few, many = list(next(iter(found["feed"].values())))
    lines = [SCALE, _machine(found["machine"]), "", f"| | {int(few):,} shards | {int(many):,} |", "|---|---|---|"]

    def row(title: str, of: dict[str, dict[str, float]], value: str, unit: str) -> None:
        lines.append(f"| {title} | " + " | ".join(f"{_short(one[value])} {unit}".strip() for one in of.values()) + " |")

    for name, of in found["feed"].items():
        row(f"{name}: a rank opens its feed", of, "open_cpu_s", "s")
        row(f"{name}: its memory, {_short(of[few]['imports_mb'])} MB of it imports", of, "peak_mb", "MB")
        row(f"{name}: row ids of a batch", of, "batch_ids_ms", "ms")
        row(f"{name}: shards fetched by a rank in an epoch", of, "fetches_an_epoch", "")
    row("`penstock plan`, rows in a store", found["plan"], "cpu_s", "s")
    row("requests of it", found["plan"], "requests", "")
    row("its memory", found["plan"], "peak_mb", "MB")
    row("listing as many objects", found["listing"], "cpu_s", "s")
    row("its memory", found["listing"], "peak_mb", "MB")
    for name, of in found["epoch"].items():
        row(f"{name}: requests of a rank in its first epoch, with those to open", of, "first_requests", "")
        row(f"{name}: requests of a rank in its second epoch", of, "epoch_1_requests", "")
    if many in found["reused"]:
        row("a reused run of as many source files, up to the order", found["reused"], "with_children_cpu_s", "s")
        row("its memory", found["reused"], "peak_mb", "MB")
        row("its requests", found["reused"], "requests", "")
    few, many = list(found["ledger"])
    lines += ["", f"| | {few} runs | {int(many):,} |", "|---|---|---|"]
    for verb in ("status", "log", "plan"):
        row(f"`penstock {verb}`", found["ledger"], f"{verb}_cpu_s", "s")
    if "columns" in found:
        few, many = list(found["columns"])
        lines += ["", f"| | {int(few):,} columns | {int(many):,} |", "|---|---|---|"]
        row("read, fit a scaler, materialize 200 rows of CSV", found["columns"], "cpu_s", "s")
        row("memory", found["columns"], "peak_mb", "MB")
    return [*lines, ""]


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    return f"{machine['date']}, {where}, Python {machine['python']}, {versions}."


def _ranked(table: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    named = {name.replace("as stored", "as stored (no shuffle)"): found for name, found in table["contenders"].items()}
    return sorted(named.items(), key=lambda item: -item[1]["1"]["of_gather"])


def _row(name: str, found: dict[str, Any]) -> str:
    cells = [
        cell for world in ("1", "2") for cell in (f"{found[world]['median'] / 1e3:,.0f} k", f"{found[world]['of_gather']:.2f}")
    ]
    bold = "**" if name.startswith(("penstock", GATHER)) else ""
    return f"| {bold}{name}{bold} | " + " | ".join(cells) + " |"


def _draw(feed: dict[str, Any]) -> None:
    tables = feed["tables"]
    figure, axes = plt.subplots(1, len(tables), figsize=(6.5 * len(tables), 5), layout="constrained", squeeze=False)
    for axis, (name, table) in zip(axes[0], tables.items(), strict=True):
        ranked = _ranked(table)[::-1]
        colors = [OURS if who.startswith("penstock") else BASE if who.startswith(GATHER) else OTHERS for who, _ in ranked]
        values = [found["1"]["of_gather"] for _, found in ranked]
        axis.barh([who for who, _ in ranked], values, color=colors)
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.2f}", va="center", fontsize=8)
        axis.axvline(1, color="#444444", linewidth=0.8, linestyle="--")
        axis.set_title(f"{name}: {table['rows']:,} rows, 1 consumer", loc="left", fontsize=10)
        axis.set_xlabel("rows per second, numpy's gather = 1")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    (DOCS / "images").mkdir(parents=True, exist_ok=True)
    figure.savefig(DOCS / "images" / "feed.png", dpi=110)


if __name__ == "__main__":
    main()
