"""How are the rows of a source scored by a registered model? A flow of its own, beside the pipeline that trained it.

Public: `flow`, `request` (its parameter).
"""
