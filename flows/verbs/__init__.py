"""The work of each verb of the command.

Public: a module named like its verb, and `which_run` (find a run by its name).
"""
