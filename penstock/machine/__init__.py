"""How are this machine's caches, its processes, their signals and their output handled?

Public: `cache_dir`, `process`, `stopping` (signals), `prints` (stdout and stderr), `empty_database`.
"""
