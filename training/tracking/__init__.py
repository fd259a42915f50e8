"""How does a run reach a tracking service, although its server may be down?

Words: a *point* is the metrics of one step; the *outbox* holds what the server has not taken yet.
Public: `tracker` (the base class), `registry` (names); MLflow's is the first.
"""
