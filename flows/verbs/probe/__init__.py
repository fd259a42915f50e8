"""How fast do a pipeline's rows reach its workers, where does the time go, and which lines of the file could change it?

A plug-in. Public: `command` (the verb of the command), `probe` (what it does), `reading` (one pass of the workers without a
model), `hints`.
"""
