"""How does a trained model become a version that answers elsewhere?

Public: `register`, `serving`.
"""
