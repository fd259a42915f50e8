"""How does xgboost train in the pipeline? As training/frameworks/boosted/ says.

Public: `framework` (what the pipeline calls), `library` (its calls, and a trained model again, without Ray).
"""
