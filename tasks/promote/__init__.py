"""Is a new version better than the one that has the alias? The plug-in behind `register.promote`.

Public: `decide` (floors, comparison, the sentence), `compare` (two registered models on the same raw rows).
"""
