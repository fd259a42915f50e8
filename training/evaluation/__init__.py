"""How good is a model, in training and finished?

Public: `metrics`, `validation` (in training), `evaluate` (a finished model), `split_measures` (one split, measured by several
processes), `figures`, `paired` (two models on the same rows).
"""
