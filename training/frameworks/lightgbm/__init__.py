"""How does lightgbm train in the pipeline? See training/frameworks/boosted/.

Public: `library` (without Ray).
"""
