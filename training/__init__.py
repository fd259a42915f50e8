"""How do prepared rows become a trained, measured and registered model? No Prefect.

Rooms, low to high: `checkpoint`, `callbacks`, `step`, `evaluation`, `loop`, `on_ray`, `frameworks`; `tracking`, `registry` and
`predict` beside them.
Public: `spec` (the keys of a file), `recipe` (what a user writes), `model` (a trained model), `job` (what a worker group
needs), `events`, `own_values` (`penstock.log`).
"""
