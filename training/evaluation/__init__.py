"""How good is a model, in training and finished?

Public: `metrics`, `validation` (in training), `evaluate` (a finished model), `paired` (two models on the same rows).
"""
