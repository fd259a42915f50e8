"""How do gradient-boosted trees train in the pipeline? In rounds, each of them one step and one pass over the train split.

A *round* adds a tree (one for each class, where there are several); a *shard table* is one rank's rows of a split, as a
matrix of features; a *library* is xgboost or lightgbm. Public: `library` (the framework, a base class of both), `table` and
`model` (a trained model), all without Ray; `rank` and `rounds` (training on Ray's workers).
"""
