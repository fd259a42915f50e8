"""How do gradient-boosted trees train in the pipeline? In rounds, each of them one step and one pass over the train split.

A *round* adds a tree (one for each class, where there are several); a *shard table* is one rank's rows of a split, as a
matrix of features; a *library* is xgboost or lightgbm behind one protocol. Public: `library` (the base class),
`framework`, `table`, `model` (a trained model, without Ray), `rank` and `rounds` (training on Ray's workers).
"""
