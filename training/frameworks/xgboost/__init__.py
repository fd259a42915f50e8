"""How does xgboost train in the pipeline? As training/frameworks/boosted/ says; `framework` is what a pipeline names."""
