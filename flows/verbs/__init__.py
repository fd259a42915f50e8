"""What does each verb of the command do? One file or folder for each.

Public: a module named like its verb, and `which_run` (which run a person means).
"""
