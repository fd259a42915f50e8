"""How are the rows of a source scored by a registered model? A flow of its own, beside the pipeline that trained it.

A plug-in. Public: `command` (the verb), `flow`, `request` (its parameter).
"""
