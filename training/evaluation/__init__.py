"""How good is a model, while it trains and when it is done?

Public: `metrics`, `validation` (inside training), `evaluate` (a finished model), `blocks` (its batches, answered to by
several processes), `figures`.
"""
