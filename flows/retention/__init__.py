"""Which old data are deleted when a run is done, and by `penstock clean`?

A plug-in, with `penstock.tasks.retention`. Public: `command` (the verb), `clean` (what it does, also at the end of a run).
"""
