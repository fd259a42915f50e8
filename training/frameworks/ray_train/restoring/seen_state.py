"""What does a loop stand with: which stateful objects, generators and numbers do its functions hold, and what is in them?

Seen are the variables of the functions of the user's code that are at work, as far as they may be read before they are written
again, and the globals of its modules; from there what containers, closures and objects of the user's own classes hold. Of an
object with `state_dict` and `load_state_dict` that is the state, of a module its tensors and modes, of a generator its state.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from penstock.config import Section
from penstock.digest import bytes_digest, stream_digest
from penstock.training.frameworks.ray_train.restoring.live_names import live_names
from penstock.training.rng import capture_rng

__all__ = ["Look", "SeenState", "gradients_digest", "look", "user_frames"]

_KEPT_BYTES, _ELEMENTS, _DEPTH = 64 << 20, 1000, 12
"""Plain tensors and arrays up to so many bytes, and containers up to so many elements, are looked at: larger ones are data."""
_MOST = 5000
"""Things with a state that are written down; variables come before globals."""
_SHORT = 8
"""Numbers of a list that are told one by one."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_SMALLEST_CLOCK = 1e5
"""A clock that shows less counts from the start of this machine, and its readings could be other numbers."""
_BEGAN = tuple(clock() for clock in _CLOCKS)
_CLOSURES = (FunctionType, MethodType, GeneratorType, functools.partial)
_LISTS = (list, tuple, deque)
_NUMBERS = (bool, int, float, complex, np.generic, type(None))


class SeenState(Section):
    """One thing with a state."""

    kind: str
    """How it is saved and put back: `state_dict`, `torch`, `bit_generator`, `RandomState`, `Random`, `plain`, or `global`."""
    type: str
    value: str
    """A number as it is written, else a digest."""


class Look(NamedTuple):
    """What was seen at one moment."""

    place: list[str]
    """Function and line of each frame of user code, the outermost first."""
    state: dict[str, SeenState]
    """`function: variable` -> what it holds; what hangs on that under longer names."""
    unbound: list[str]
    """Variables that may be read later, and have no value now: code that reads one would fail."""


def user_frames(package: str, frame: FrameType | None) -> list[FrameType]:
    """The frames from `frame` outwards that run code of the user's package, the outermost first."""
    found = []
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def look(
    package: str, frames: list[FrameType], params: Mapping[str, Any], device: torch.device, *, numbers_only: bool = False
) -> Look:
    """What is seen from these frames.

    Args:
        package: top-level name of the user's modules.
        params: what the pipeline file says. Where a dict holds that, it is left out: a change of it is told as such.
        device: whose generator counts.
        numbers_only: leave out all but the numbers that variables hold.
    """
    seeing, unbound = _Seeing(package, params), []
    for frame in frames:
        bound, absent = _variables(frame)
        owner = frame.f_code.co_qualname
        unbound += [f"{owner}: {name}" for name in absent]
        for name, value in bound.items():
            if not numbers_only or isinstance(value, _NUMBERS):
                seeing.see(f"{owner}: {name}", value)
    if not numbers_only:
        for module in [each for name, each in list(sys.modules.items()) if name.partition(".")[0] == package]:
            for name, value in sorted(vars(module).items()):
                if not name.startswith("__"):
                    seeing.see(f"{module.__name__.rpartition('.')[2]}.py: {name}", value)
        seeing.found["the process: random numbers"] = SeenState(
            kind="global", type="generators", value=bytes_digest(capture_rng(device).numpy().tobytes())
        )
    place = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in frames]
    return Look(place, seeing.found, unbound)


def gradients_digest(parameters: Iterator[Tensor]) -> str:
    """Of the gradients that are there."""
    return stream_digest(_content([each.grad for each in parameters]))


def _variables(frame: FrameType) -> tuple[dict[str, Any], list[str]]:
    """Those that may still be read: name -> value, in order; and those without a value."""
    there = frame.f_locals
    names = sorted(live_names(frame.f_code, frame.f_lasti))
    bound = {name: there[name] for name in names if name in there}
    # What a variable holds is known by its name, and not by that of a closure which has it, too.
    bound = dict(sorted(bound.items(), key=lambda item: isinstance(item[1], _CLOSURES)))
    if isinstance(there, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        there.clear()  # before Python 3.13 it is a copy, which the frame would keep with all that is in it
    return bound, [name for name in names if name not in bound]


class _Seeing:
    def __init__(self, package: str, params: Mapping[str, Any]) -> None:
        self.found: dict[str, SeenState] = {}
        self._package, self._params = package, params
        self._known: dict[int, Any] = {}

    def see(self, name: str, value: Any, depth: int = 0) -> None:
        """Write down what `value` and what it holds stand with; what was seen under another name is left out."""
        if len(self.found) >= _MOST:
            return
        if isinstance(value, _LISTS) and len(value) > _SHORT and all(isinstance(each, _NUMBERS) for each in value):
            self._add(name, "plain", value, _digest(value))
        elif isinstance(value, (*_NUMBERS, itertools.count)):
            if not _is_of_a_clock(value):
                self._add(name, "plain", value, repr(value))
        else:
            self._see_object(name, value, depth)

    def _see_object(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self._known or depth > _DEPTH or isinstance(value, ModuleType):
            return
        self._known[id(value)] = value  # kept, so that no other gets its place in memory
        if isinstance(value, nn.Module):
            self._see_module(name, value, depth)
        elif not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
            self._add(name, "state_dict", value, _digest(value.state_dict()))
        elif isinstance(value, torch.Generator):
            self._add(name, "torch", value, _digest(value.get_state()))
        elif isinstance(value, np.random.Generator):
            self._add(name, "bit_generator", value, _digest(value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            self._add(name, "RandomState", value, _digest(value.get_state(legacy=True)))
        elif isinstance(value, random.Random):
            self._add(name, "Random", value, _digest(value.getstate()))
        elif isinstance(value, Tensor | np.ndarray):
            size = (
                value.numel() * value.element_size() if isinstance(value, Tensor) else value.nbytes
            )  # a sparse one has no `nbytes`
            if size <= _KEPT_BYTES and getattr(value, "grad_fn", None) is None:
                self._add(name, "plain", value, _digest(value))
        else:
            for more, each in self._held(value):
                self.see(name + more, each, depth + 1)

    def _see_module(self, name: str, module: nn.Module, depth: int) -> None:
        tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        self._known.update((id(tensor), tensor) for tensor in tensors.values())
        parts = dict(module.named_modules())
        self._known.update((id(part), part) for part in parts.values())
        modes = {path: part.training for path, part in parts.items()}
        learns = {path: tensor.requires_grad for path, tensor in tensors.items()}
        self._add(name, "state_dict", module, _digest([tensors, modes, learns]))
        for path, part in parts.items():
            if self._is_own(type(part)):
                inner = f"{name}.{path}" if path else name
                for attribute, value in _attributes(part).items():
                    if attribute != "training":
                        self.see(f"{inner}.{attribute}", value, depth + 1)

    def _held(self, value: Any) -> Iterator[tuple[str, Any]]:
        """What else may have a state, by how it is reached."""
        if isinstance(value, Mapping):
            if len(value) <= _ELEMENTS:
                yield from ((f"[{key!r}]", each) for key, each in value.items() if not self._is_param(key, each))
        elif isinstance(value, _LISTS):
            if len(value) <= _ELEMENTS:
                yield from ((f"[{number}]", each) for number, each in enumerate(value))
        elif isinstance(value, DataLoader):
            yield from ((f".{name}", getattr(value, name)) for name in ("generator", "sampler", "batch_sampler", "dataset"))
        elif isinstance(value, FunctionType) and self._is_own(value):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            yield from ((f".{name}", cell.cell_contents) for name, cell in cells if _is_filled(cell))
        elif isinstance(value, MethodType):
            yield "", value.__self__
        elif isinstance(value, functools.partial):
            yield from (("", value.func), (".args", value.args), (".keywords", value.keywords))
        elif isinstance(value, GeneratorType):
            if value.gi_frame is not None and user_frames(self._package, value.gi_frame):
                yield from ((f".{name}", each) for name, each in _variables(value.gi_frame)[0].items())
        elif isinstance(value, (Sampler, SimpleNamespace, argparse.Namespace)) or (
            self._is_own(value if isinstance(value, type) else type(value))
        ):
            yield from ((f".{name}", each) for name, each in _attributes(value).items())

    def _is_param(self, key: Any, value: Any) -> bool:
        given = self._params.get(key) if isinstance(key, str) else None
        return type(given) is type(value) and isinstance(value, (*_NUMBERS, list, dict)) and bool(given == value)

    def _is_own(self, definition: Any) -> bool:
        return str(getattr(definition, "__module__", "")).partition(".")[0] == self._package

    def _add(self, name: str, kind: str, value: Any, content: str) -> None:
        self.found[name] = SeenState(kind=kind, type=type(value).__name__, value=content)


def _attributes(value: Any) -> dict[str, Any]:
    """Those that are its own, and no functions of a class."""
    there = getattr(value, "__dict__", {})
    hidden = ("_", "__") if isinstance(value, nn.Module) else ("__",)
    functions = (FunctionType, classmethod, staticmethod, property) if isinstance(value, type) else ()
    return {name: each for name, each in there.items() if not name.startswith(hidden) and not isinstance(each, functions)}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is the only way to know
    except ValueError:
        return False
    return True


def _is_of_a_clock(value: Any) -> bool:
    """Whether it is a time that was read in this process: it is another one in each, and no state."""
    if not isinstance(value, float):
        return False
    readings = zip(_BEGAN, _CLOCKS, strict=True)
    return any(began > _SMALLEST_CLOCK and began <= value <= clock() for began, clock in readings)


def _digest(value: Any) -> str:
    return stream_digest(_content(value))


def _content(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        own = value.detach()
        own = (own.to_local() if hasattr(own, "to_local") else own).cpu()
        if own.layout is not torch.strided or own.is_nested:
            saved = io.BytesIO()
            torch.save(own, saved)
            yield saved.getvalue()
            return
        yield repr((own.dtype, tuple(own.shape))).encode()
        yield own.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data if own.numel() else b""
    elif isinstance(value, np.ndarray):
        yield repr((value.dtype.str, value.shape)).encode()
        if value.dtype.hasobject:
            yield from _content(value.tolist())
        else:
            yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"{len(value)} named".encode()
        for key, each in sorted(value.items(), key=lambda item: repr(item[0])):
            yield repr(key).encode()
            yield from _content(each)
    elif isinstance(value, _LISTS):
        yield f"{len(value)} listed".encode()
        for each in value:
            yield from _content(each)
    else:
        known = isinstance(value, (*_NUMBERS, str, bytes))
        yield (repr(value) if known else f"a {type(value).__qualname__}").encode()
