"""What happens around the stages of a run? It is chosen, and its records here, in Prefect and at the tracker are kept true.

Public: `open_attempt` and `close_attempt` (before and after the stages), `decisions`, `repair`, `reporter`, `request` (the
run that a flow is asked for), `flow_runs` (Prefect's record of an attempt), `retention`.
"""
