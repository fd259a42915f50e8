"""Which variables of a function at work may be read before they are written again, or count the turns of its loops?

Source: liveness, as compilers find it, on the bytecode of CPython.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType
from typing import NamedTuple

__all__ = ["live_names"]

_NO_WAY_ON = ("RETURN_", "RAISE_", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")


class _Flow(NamedTuple):
    """Of a function's code, by the index of an instruction."""

    offsets: list[int]
    after: list[frozenset[str]]
    """Names that may be read before they are written again, once the instruction has done its work."""
    loops: list[tuple[int, int, frozenset[str]]]
    """(offset of its header, offset behind it, names that the header writes) of each `for`."""


def live_names(code: CodeType, at: int) -> frozenset[str]:
    """Local names of a function whose instruction at byte `at` is at work; those that inner functions share are among them."""
    flow = _flow_of(code)
    index = max(number for number, offset in enumerate(flow.offsets) if offset <= max(at, 0))
    turns = (names for begin, end, names in flow.loops if begin < flow.offsets[index] < end)
    return frozenset({*code.co_cellvars, *code.co_freevars}.union(flow.after[index], *turns))


@functools.lru_cache(256)
def _flow_of(code: CodeType) -> _Flow:
    steps = list(dis.get_instructions(code))
    where = {step.offset: number for number, step in enumerate(steps)}
    follow = [_follow(steps, number, where) for number in range(len(steps))]
    caught: list[list[int]] = [[] for _ in steps]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]  # typeshed lacks it
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end:
                caught[number].append(where[entry.target])
    touched = [_touched(step) for step in steps]
    before: list[frozenset[str]] = [frozenset() for _ in steps]
    after, changed = before.copy(), True
    while changed:
        changed = False
        for number in reversed(range(len(steps))):
            reads, writes = touched[number]
            thrown = frozenset[str]().union(*(before[each] for each in caught[number]))
            after[number] = thrown.union(*(before[each] for each in follow[number]))
            live = reads | (after[number] - writes) | thrown
            changed = changed or live != before[number]
            before[number] = live
    loops = [
        (step.offset, step.argval, _header_names(steps, number))
        for number, step in enumerate(steps)
        if step.opname == "FOR_ITER"
    ]
    return _Flow([step.offset for step in steps], after, loops)


def _follow(steps: list[dis.Instruction], number: int, where: dict[int, int]) -> list[int]:
    step = steps[number]
    jump = [where[step.argval]] if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs else []
    goes_on = number + 1 < len(steps) and not step.opname.startswith(_NO_WAY_ON)
    return [*jump, *([number + 1] if goes_on else [])]


def _touched(step: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Local names that it reads, and that it writes."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if step.opname == "STORE_FAST_LOAD_FAST":  # one instruction for two, from Python 3.13
        return frozenset(names[1:]) - {names[0]}, frozenset(names[:1])
    if step.opname.startswith("LOAD_FAST"):
        return frozenset(names), frozenset()
    return frozenset(), frozenset(names) if step.opname.startswith(("STORE_FAST", "DELETE_FAST")) else frozenset()


def _header_names(steps: list[dis.Instruction], number: int) -> frozenset[str]:
    names: frozenset[str] = frozenset()
    for step in steps[number + 1 :]:
        if not step.opname.startswith(("STORE_FAST", "UNPACK_")):
            break
        names |= _touched(step)[1]
    return names
