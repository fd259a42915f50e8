"""How is a run chosen and recorded here, in Prefect and at the tracker?

Public: `open_attempt` and `close_attempt` (before and after the stages), `decisions`, `repair`, `reporter`, `request` (the
parameters of the flow), `flow_runs` (Prefect's record of an attempt).
"""
