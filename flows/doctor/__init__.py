"""Would a run work on this machine, with the servers that its environment names?

A plug-in. Public: `command` (the verb), `doctor`.
"""
