"""What does `penstock probe` do? It reads as configured, then with other values while there is time, and says the fastest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from rich.console import Console

from penstock.errors import PenstockError, SpecError
from penstock.flows.run.open_attempt import RayOnDemand
from penstock.flows.run.preflight import check_recipe, check_storage, machine_cpus
from penstock.flows.run.reporter import make_reporter
from penstock.flows.servers.probes import ray_address
from penstock.flows.servers.services import telemetry_off
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.probe.knobs import ADVICE, EFFECTS, Knob, Surroundings, knobs
from penstock.flows.verbs.probe.measure import Reading, Reads
from penstock.flows.verbs.run import interrupts_once_stopped
from penstock.machine.stopping import StopRequest, stop_behind, stopping_on_signals
from penstock.redact import redact_text
from penstock.tasks.project import Project
from penstock.tasks.spec import PipelineSpec

__all__ = ["probe_pipeline", "show_probe"]


FASTER = 1.05
"""A change is kept where reading gets faster by more than what repeats differ by."""

READ_S = (2.0, 10.0)
"""The workers read at most so long each time, and at least so long if the budget is small."""


def probe_pipeline(
    file: Path, overrides: list[str], budget_s: float, plot: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure how the pipeline is read; returns what `penstock probe --json` prints.

    Rows that are not prepared yet are prepared, as a run would, and are there for the next run.

    Args:
        budget_s: seconds for trying other values, after it was read as configured; what has begun comes to its end.
        plot: where to write a PNG.
        say: takes lines for a person.

    Raises:
        PenstockError: the pipeline cannot be read as it is configured.
    """
    if budget_s < 0 or (plot is not None and plot.suffix != ".png"):
        raise SpecError(f"--plot {plot} is no .png file" if budget_s >= 0 else f"--budget-s {budget_s:g} is below 0")
    began_s = time.monotonic()
    telemetry_off()
    loaded = load_spec(file, overrides)
    project = Project(loaded.spec, loaded.base_dir, loaded.origins)
    check_storage(project.storage)
    check_recipe(project)
    reporter, stopping = make_reporter(), StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts_once_stopped(stopping))
        stack.enter_context(stopping_on_signals(stopping))
        need_ray = RayOnDemand(loaded, project, reporter, stopping, stack)
        limit_s = min(READ_S[1], max(READ_S[0], budget_s / 10))
        reads = Reads(loaded, reporter, stopping, need_ray, limit_s)
        configured = reads.read({})
        for line in _lines(configured, loaded.spec):
            say(line)
        around = _surroundings(project, configured, on_cluster=ray_address() is not None)
        search = _Search(reads, configured, around, say)
        search.go(time.monotonic() + budget_s)
    result = search.result()
    if plot is not None:
        from penstock.flows.verbs.probe.plot import draw  # matplotlib takes a second to load

        labels = [(_label(each["values"]), each["rows_per_s"]) for each in search.tried if "rows_per_s" in each]
        draw(plot, f"{loaded.spec.name}: how its rows are read", configured, labels)
    return {**result, "plot": str(plot) if plot is not None else None, "seconds": time.monotonic() - began_s}


class _Search:
    """Takes one knob after the other, and keeps what makes reading faster."""

    def __init__(self, reads: Reads, configured: Reading, around: Surroundings, say: Callable[[str], None]) -> None:
        self._reads, self._around, self._say = reads, around, say
        self.configured, self.best = configured, configured
        self.effects: list[str] = []
        self.tried: list[dict[str, Any]] = []

    def go(self, until_s: float) -> None:
        """Try what there is until that moment of the monotonic clock."""
        seen: list[dict[str, Any]] = []
        while time.monotonic() < until_s:
            spec = self._reads.spec(self.best.values)
            following = next((knob for knob in knobs(spec, self.best.place, self._around) if knob.values not in seen), None)
            if following is None:
                return
            seen.append(following.values)
            self._try(following)

    def _try(self, knob: Knob) -> None:
        values = {**self.best.values, **knob.values}
        tried: dict[str, Any] = {"values": values, "changes": EFFECTS[knob.effect]}
        try:
            reading = self._reads.read(values)
        except PenstockError as error:
            if stop_behind(error) is not None:
                raise
            tried["refused"] = redact_text(error.message)
            self._say(f"  {_label(values)}: not possible: {tried['refused']}")
        else:
            factor = reading.rows_per_s / self.configured.rows_per_s
            tried |= {
                "rows_per_s": reading.rows_per_s,
                "factor": factor,
                "prepare_s": reading.prepare_s,
                "place": reading.place,
            }
            self._say(f"  {_label(values)}: {reading.rows_per_s:,.0f} rows/s, {factor:.2f} times; {tried['changes']}")
            # Steps of another size are another training: what they would bring is printed, and not taken.
            if knob.effect != "training" and reading.rows_per_s > FASTER * self.best.rows_per_s:
                self.best = reading
                self.effects.append(tried["changes"])
        self.tried.append(tried)

    def result(self) -> dict[str, Any]:
        """The JSON object, but for the plot."""
        fastest = {
            "values": self.best.values,
            "spec": spec_lines(self.best.values),
            "rows_per_s": self.best.rows_per_s,
            "factor": self.best.rows_per_s / self.configured.rows_per_s,
            "changes": list(dict.fromkeys(self.effects)),
        }
        figures = self.configured.model_dump(mode="json", exclude={"values"})
        return {
            "status": "done",
            **figures,
            "advice": ADVICE[self.configured.place],
            "tried": self.tried,
            "fastest": fastest,
        }


def spec_lines(values: dict[str, Any]) -> str:
    """Lines of a pipeline file that hold these values; empty for none."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    return "\n".join(
        f"{section}: {yaml.safe_dump(inner, default_flow_style=True, sort_keys=False).strip()}"
        for section, inner in nested.items()
    )


def _surroundings(project: Project, reading: Reading, *, on_cluster: bool) -> Surroundings:
    resources = ray.cluster_resources()
    rows_bytes = reading.split_bytes or 3 * sum(file.size_bytes for file in project.files)
    return Surroundings(
        cpus=resources.get("CPU", 1.0) if on_cluster else machine_cpus(),
        object_store_bytes=resources.get("object_store_memory", 0.0),
        remote=not project.storage.is_local,
        rows_bytes=rows_bytes,
        beyond_memory=rows_bytes > psutil.virtual_memory().available // 2,
    )


def _label(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in values.items())


def _lines(reading: Reading, spec: PipelineSpec) -> list[str]:
    first_goes, time_goes = (
        ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        for shares in (reading.first_time, reading.time)
    )
    p50_ms, p95_ms, longest_ms = (each * 1e3 for each in (reading.p50_s, reading.p95_s, reading.longest_s))
    return [
        f"as configured (cache {spec.materialize.cache}, shuffle {spec.shuffle.mode}, {spec.train.workers} workers), "
        f"{reading.epochs:.2f} epochs",
        f"  first batch  {reading.first_batch_s:.3f} s: {first_goes}",
        f"  then waits   P50 {p50_ms:.2f} ms, P95 {p95_ms:.2f} ms, longest {longest_ms:.1f} ms",
        f"  rate         {reading.rows_per_s:,.0f} rows/s, {reading.worker_mib_per_s:,.1f} MiB/s each worker",
        f"  time goes    {time_goes}",
        f"  {reading.place}: {ADVICE[reading.place]}",
    ]


def show_probe(result: dict[str, Any], console: Console) -> None:
    """Print what was fastest, for a person."""
    fastest = result["fastest"]
    if not fastest["values"]:
        said = "nothing that was tried is faster" if result["tried"] else "there was no time to try anything: raise --budget-s"
        console.print(said, markup=False, soft_wrap=True)
    else:
        console.print(f"fastest, {fastest['factor']:.2f} times as fast as configured:", markup=False)
        console.print(fastest["spec"], markup=False, soft_wrap=True)
        for line in fastest["changes"]:
            console.print(f"  ({line})", markup=False, soft_wrap=True)
    if result["plot"]:
        console.print(f"plot: {result['plot']}", markup=False, soft_wrap=True)
