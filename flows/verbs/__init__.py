"""How does each verb of the core work?

Public: a module named like its verb.
"""
