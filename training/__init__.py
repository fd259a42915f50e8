"""Training: specs, recipes, the loop, checkpoints, evaluation, tracking and the registry. No Prefect.

Rooms, low to high: `checkpoint`, `step`, `evaluation`, `loop`, `on_ray`, `frameworks`; `tracking` and `registry` beside them.
"""
