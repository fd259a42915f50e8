"""Which `register.promote` may a pipeline file have?"""

from __future__ import annotations

from pathlib import Path

from penstock.flows.spec_file import load_spec
from tests.flows.test_spec_file import GOOD, problems_of, write


def test_promote_metric_needs_its_split(tmp_path: Path) -> None:
    moved_by = "register.promote={metric: %s/accuracy}"
    assert load_spec(write(tmp_path, GOOD), [moved_by % "val"]).spec.register_.promote is not None
    (problem,) = problems_of(write(tmp_path, GOOD), moved_by % "test")
    assert problem.endswith("register.promote.metric: 'test/accuracy' needs a test split; set data.test")
    (problem,) = problems_of(write(tmp_path, GOOD), moved_by % "val", "data.validation=null")
    assert problem.endswith("register.promote.metric: 'val/accuracy' needs a validation split; set data.validation")
    (problem,) = problems_of(write(tmp_path, GOOD), "register.promote={metric: val/loss}")
    assert "register.promote.metric: 'val/loss' is a loss, which is the recipe's own" in problem
    (problem,) = problems_of(write(tmp_path, GOOD), "register.promote={metric: accuracy}")
    assert "'accuracy' is not test/NAME or val/NAME, and only a function (train.loop) reports other names" in problem
    of_loop = ["train={loop: model.py:train}", "register.promote={metric: accuracy}"]
    assert load_spec(write(tmp_path, GOOD), of_loop).spec.register_.promote is not None
    for policy, said in (
        ("{metric: score}", "mode is missing: whether 'score' is better lower (min) or higher (max)"),
        ("{metric: score, mode: max, floors: {a: 1}}", "floors are of measured metrics"),
        ("{metric: accuracy, mode: min}", "better the higher"),
        ("{metric: val/accuracy, mode: max}", "mode is for a reported name"),
    ):
        (problem,) = problems_of(write(tmp_path, GOOD), of_loop[0], f"register.promote={policy}")
        assert said in problem


def test_promote_floors_need_their_slices_and_metric(tmp_path: Path) -> None:
    slices = "evaluate={metrics: [accuracy, f1], slices: [site, {age: [18, 30]}]}"
    policy = "register.promote={metric: val/%s, floors: {%s: 0.7}}"
    for slice_ in ("site", "site=007", "'age<18'"):
        assert load_spec(write(tmp_path, GOOD), [slices, policy % ("f1", slice_)]).spec.register_.promote is not None
    (problem,) = problems_of(write(tmp_path, GOOD), slices, policy % ("f1", "city"))
    assert problem.endswith("register.promote.floors: 'city' is not one of evaluate.slices (site, age), nor a slice of it")
    (problem,) = problems_of(write(tmp_path, GOOD), slices, policy % ("mcc", "site"))
    assert problem.endswith("register.promote.floors: they need val/mcc of slices; add mcc to evaluate.metrics")
