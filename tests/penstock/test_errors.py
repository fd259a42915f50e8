"""Errors say what to do next, carry an exit code, and cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

from penstock import errors
from penstock.errors import CheckpointError, DataError, Interrupted, PenstockError, ServiceError

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not Interrupted])
def test_every_error_survives_pickle(kind: type[PenstockError]) -> None:
    error = kind("it broke", problems=["a", "b"], next_step="mend it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "it broke\n  - a\n  - b\nNext: mend it"
    assert copy.exit_code == error.exit_code


def test_notebook_shows_error_without_traceback() -> None:
    assert DataError("it broke", next_step="mend it")._render_traceback_() == ["DataError: it broke\nNext: mend it"]


def test_exit_codes_of_error_classes() -> None:
    codes = {kind.__name__: kind.exit_code for kind in KINDS if kind is not Interrupted}
    assert codes == {
        "PenstockError": 1,
        "SpecError": 2,
        "PreflightError": 3,
        "ServiceError": 3,
        "DataError": 4,
        "ShardError": 4,
        "TrainingError": 5,
        "CheckpointError": 5,
        "ResumeError": 6,
        "LeaseHeldError": 6,
    }
    assert Interrupted(2).exit_code == 130
    assert pickle.loads(pickle.dumps(Interrupted(15))).exit_code == 143


def test_error_that_ends_command_keeps_own_next_step_first() -> None:
    assert "run the same command again" in DataError("x").with_next_step().next_step
    assert DataError("x", next_step="look").with_next_step().next_step == "look"
    fresh = CheckpointError("x", next_step="start over with `penstock run FILE --fresh`")
    assert fresh.with_next_step().next_step == "start over with `penstock run FILE --fresh`"
    named = fresh.with_next_step("penstock run a.yaml --set train.epochs=3").next_step
    assert named == "start over with `penstock run a.yaml --set train.epochs=3 --fresh`"


def test_problems_of_any_sequence_become_a_tuple() -> None:
    assert DataError("x", problems=[]).problems == ()


def test_error_texts_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    error = ServiceError(
        "https://user:hunter2@host/api does not answer",
        problems=["signed with wJalrXUtnFEMI/K7MDENG", "GET /a?X-Amz-Signature=0123abcd&x=1"],
        next_step="look at https://user:hunter2@host",
    )
    shown = f"{error} {error.args} {error!r} {pickle.loads(pickle.dumps(error))}"
    assert not any(secret in shown for secret in ("hunter2", "wJalr", "0123abcd"))
    assert "***@host/api does not answer" in error.message
