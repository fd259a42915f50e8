"""A lease that is lost while rows are scored is reported, whatever a library makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import LeaseHeldError
from penstock.flows.predict import flow as predict_flow
from penstock.flows.predict.request import PredictRequest
from penstock.machine.stopping import StopRequest
from tests.flows.test_lease_taken_over import LOST, MADE_OF_IT, lose


@pytest.mark.parametrize("made_of_it", MADE_OF_IT)
def test_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_of_it: Callable[..., Any]) -> None:
    requests: list[StopRequest] = []

    def make() -> StopRequest:
        requests.append(StopRequest())
        return requests[-1]

    model = SimpleNamespace(uri="models:/m/1", name="m", run_id=None)
    asked = SimpleNamespace(data=SimpleNamespace(train=str(tmp_path / "in")), is_kept=False, model_digest="d", input_digest="i")
    plan = SimpleNamespace(todo=[])
    monkeypatch.setattr(predict_flow, "StopRequest", make)
    monkeypatch.setattr(predict_flow, "fetched_model", lambda *_: contextlib.nullcontext(model))
    monkeypatch.setattr(predict_flow, "ask", lambda *_: asked)
    monkeypatch.setattr(predict_flow, "list_input", lambda _: SimpleNamespace(describe_left_out=lambda: "", files=[]))
    monkeypatch.setattr(predict_flow, "plan", lambda *_: plan)
    monkeypatch.setattr(predict_flow, "score", lambda *_: lose(requests[0], made_of_it))
    request = PredictRequest(model="m", input=str(tmp_path / "in"), output=str(tmp_path / "out"), state_dir=str(tmp_path))
    (tmp_path / "in").mkdir()
    with pytest.raises(LeaseHeldError) as ended:
        predict_flow.predict.fn(request)
    assert ended.value is LOST
