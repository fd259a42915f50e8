"""How are several errors told as one?"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import DataError, PenstockError, SpecError

__all__ = ["together"]


def together(errors: Sequence[PenstockError], said: str) -> PenstockError:
    """Several errors as one of their kind, or as a SpecError where kinds differ; an only one as it is.

    Args:
        errors: at least one. One that is told twice counts once.
        said: what they have in common, for the message.
    """
    parts = list({error.message: error for each in errors for error in each.parts or (each,)}.values())
    if len(parts) == 1:
        return parts[0]
    problems: list[str] = []
    for error in parts:
        if isinstance(error, SpecError) and error.problems:
            problems += error.problems  # each of them names its key
        else:
            problems.append(error.message + (f" ({'; '.join(error.problems)})" if error.problems else ""))
    steps = dict.fromkeys(step for error in parts if error.next_step for step in error.next_step.split("; "))
    kind = DataError if all(isinstance(error, DataError) for error in parts) else SpecError
    whole = kind(said, problems=problems, next_step="; ".join(steps))
    whole.parts = tuple(parts)
    return whole
