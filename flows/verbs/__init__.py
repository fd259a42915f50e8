"""How does each verb of the command work?

Public: a module named like its verb, and `which_run` (find a run by its name).
"""
