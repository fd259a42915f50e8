"""How does xgboost train in the pipeline? See training/frameworks/boosted/.

Public: `library` (without Ray).
"""
