"""How do numbers of a skewed distribution come to an even or normal one? By what the train split's values look like.

Public: one module a transform (`power`, `quantile`); `numbers` is what they share.
"""
