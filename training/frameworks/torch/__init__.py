"""How does torch train in the pipeline? The user's recipe (training/recipe.py), on Ray Train workers (training/on_ray/).

Public: `framework` (what the pipeline calls), `loading` (a trained model again, without Ray).
"""
