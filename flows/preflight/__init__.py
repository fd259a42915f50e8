"""Would a run succeed here? What can be checked before anything is spent.

Public: `checks` (storage, files, columns, code, disk, memory), `try_batch` (one real batch), `cpus` (workers and their CPUs).
"""
