"""How is a pipeline put on a schedule, and how are its failures reported?

A plug-in. Public: `command` (the verb), `deploy`, `notify`.
"""
