"""What would a person say of a comparison in a few sentences? What differs first, then what most likely made the result so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.ingest.schema import METRICS_OF
from penstock.messages import counted

__all__ = ["findings"]

_FEW = 5


def findings(compared: Mapping[str, Any]) -> list[str]:
    """Sentences, the most telling first, from the other parts of `penstock compare --json`."""
    data, changed = compared["data"], compared["changed"]
    found = [*_result(compared)]
    found += [_file(file, data["classes"]) for file in data["files"][:_FEW]]
    if len(data["files"]) > _FEW:
        found.append(f"{counted(len(data['files']) - _FEW, 'more source file differs', 'more source files differ')}.")
    found += [
        f"Class {entry['class']!r} is {entry['share_after']:.1%} of the {entry['split']} rows now, and was "
        f"{entry['share_before']:.1%}."
        for entry in data["classes"]
        if entry["drifted"]
    ][:_FEW]
    drifted = [entry for entry in data["columns"] if entry["drifted"]]
    found += [f"Column {entry['column']!r} has drifted: {entry['said'] or entry['kind']}." for entry in drifted[:_FEW]]
    if len(drifted) > _FEW:
        found.append(f"{counted(len(drifted) - _FEW, 'more column has', 'more columns have')} drifted.")
    found += [f"The code differs in {code['file']}" + _named(code["names"]) + "." for code in compared["code"]]
    found += [f"Setting {change['name']}: {change['before']} -> {change['after']}." for change in changed["spec"][:_FEW]]
    found += [f"Version of {change['name']}: {change['before']} -> {change['after']}." for change in changed["versions"][:_FEW]]
    if not (changed["spec"] or changed["versions"] or compared["code"] or data["files"]):
        found.append("Both have the same data, code, settings and versions.")
    return found


def _result(compared: Mapping[str, Any]) -> list[str]:
    metric = next((entry for entry in compared["metrics"] if entry["metric"] == compared["main_metric"]), None)
    if metric is None or metric["difference"] is None:
        return []
    split, _, name = metric["metric"].partition("/")
    word = {True: "better", False: "worse", None: "the same"}[metric["better"]]
    said = f"{metric['metric']} is {word}: {metric['before']:.4f} -> {metric['after']:.4f} ({metric['difference']:+.4f})"
    for entry in compared["same_rows"]:
        for paired in entry["metrics"]:
            if METRICS_OF[entry["split"]] == split and paired["metric"] == name:
                chance = "" if paired["sure"] else ", which may be chance"
                said += f"; on the {counted(entry['rows'], 'row')} that both judged by {paired['difference']:+.4f}"
                if paired["low"] is not None:
                    said += f", 95 % interval [{paired['low']:+.4f}, {paired['high']:+.4f}]{chance}"
    return [said + "."]


def _file(file: Mapping[str, Any], classes: list[Mapping[str, Any]]) -> str:
    said = f"{file['name']} was {file['what']}" if file["what"] != "gone" else f"{file['name']} is gone"
    if file["rows"] is not None or file["rows_before"] is not None:
        rows = file["rows"] if file["rows"] is not None else file["rows_before"]
        said += f", {counted(rows, 'row')}"
    total = sum(file["classes"].values())
    apart = []
    for name, count in file["classes"].items():
        was = next((e["share_before"] for e in classes if e["class"] == name and e["split"] == "train"), None)
        if total and was is not None and abs(count / total - was) > 0.1:
            apart.append(f"{count / total:.1%} of class {name!r}, where the rows before had {was:.1%}")
    return said + (": " + "; ".join(apart) if apart else "") + "."


def _named(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
