"""How is a pipeline put on a schedule, and how are its failures reported?

Public: `deploy`, `notify`.
"""
