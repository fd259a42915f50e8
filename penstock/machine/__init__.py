"""What does this machine and process give and take: caches kept on it, signals, the identity of a process?

Public: `cache_dir`, `process`, `stopping` (signals), `prints` (stdout and stderr), `garbage`, `empty_database`.
"""
