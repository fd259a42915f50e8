"""How does a trained model become a version that answers elsewhere?

Public: `registry` (the protocol and the names); MLflow's is the first: `mlflow_registry`, `register`, `serving`.
"""
