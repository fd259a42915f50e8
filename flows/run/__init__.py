"""What does a run need around its stages: decisions, checks before anything is spent, repair, and words for people?

Public: `open_attempt` and `close_attempt` (what comes before and after the stages), `decisions`, `preflight`, `repair`,
`reporter`, `request` (what a flow run is asked to do), `flow_runs` (Prefect's record of an attempt), `retention`.
"""
