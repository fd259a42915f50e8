"""What does a tracking service learn of a run, although its server may be down?

Words: a *point* is the metrics of one step; the *outbox* holds what the server has not taken yet.
Public: `tracker` (the protocol), `registry` (names), `queued_tracker` (what any tracker wants); MLflow's is the first.
"""
