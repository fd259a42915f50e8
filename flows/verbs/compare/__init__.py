"""How do two runs differ, and why is one of them worse? Spec, code, data and results, from what the runs left on record.

Public: `compare`; `source`, `results` and `findings` are its parts, `page` shows it.
"""
