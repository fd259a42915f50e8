"""Can a run succeed here?

Public: `checks` (storage, files, columns, code, disk, memory), `try_batch` (one real batch), `cpus` (workers and their CPUs).
"""
