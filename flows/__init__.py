"""How do the stages become a Prefect flow, and how does a person call it?

Public: `pipeline` (the flow), `spec_file` (a YAML file as a checked spec), `cli` (the `penstock` command; `looking_back`
and `operating` have verbs of it, `options` what several verbs take, `answer` how they answer).
Rooms: `servers`, `history`, `preflight`, `run`, `tune`, `predict`, `verbs`.
"""
