"""Choose a run, and keep its records true here, in Prefect and at the tracker.

Public: `open_attempt` and `close_attempt` (before and after the stages), `decisions`, `repair`, `reporter`, `request` (the
parameters of the flow), `flow_runs` (Prefect's record of an attempt), `retention`.
"""
