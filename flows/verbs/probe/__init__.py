"""How fast do a pipeline's rows reach its workers, where does the time go, and which lines of the file could change it?

Public: `probe` (the verb), `reading` (one pass of the workers without a model), `hints`.
"""
