"""How fast do a pipeline's rows reach its workers, and where does the time go?

A plug-in. Public: `command` (the verb), `probe` (what it does), `reading` (one pass of the workers without a model).
"""
