"""What does MLflow learn of a run, although its server may be down?

Words: a *point* is the metrics of one step; the *outbox* holds what the server has not taken yet. Public: `tracker`, `repair`.
"""
