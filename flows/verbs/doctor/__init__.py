"""Would a run work here, and if not, what is the next command?

Public: `diagnose`; `machine` and `servers` are what it looks at, `finding` is what it says of one thing.
"""
