"""How does a pipeline get onto a schedule, and who learns of it when it fails there?

Public: `deploy`, `notify`.
"""
