"""How is a sweep made? A flow performs trials of one pipeline side by side in one Ray cluster, and runs the best to its end.

A plug-in, with `penstock.tasks.tune`. Public: `command` (the verb of the command), `flow`, `driver`
(which trial runs next), `trial`, `sweep` (their records), `space` (the spec of a trial), `summary` (what has come of
it so far).
"""
