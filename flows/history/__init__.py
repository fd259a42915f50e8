"""What is on record of runs? Lists them, compares two, renders one as a page, and finds the rows of a step.

A plug-in. Public: `command` (the verbs), `log`, `comparison`, `drift` (of the data), `report` and `render` (the
page), `rows`, `which_run` (a run by its name), `metrics` (by which a run is judged).
"""
