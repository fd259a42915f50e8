"""How do prepared rows become a trained, evaluated and registered model? No Prefect.

Rooms, low to high: `checkpoint`, `callbacks`, `step`, `evaluation`, `loop`, `on_ray`, `frameworks`; `tracking`, `registry` and
`predict` beside them.
Public: `spec` (the keys of a file), `recipe` (the user's class), `model` (a trained model), `job` (one attempt at training),
`events`, `own_values` (`penstock.log`).
"""
