"""How are the stages run as a Prefect flow and from the command line?

Public: `pipeline` (the flow), `spec_file` (a checked spec from a YAML file), `cli` (the `penstock` command; `looking_back`
and `operating` have some of its verbs, `options` their common arguments, `answer` their output).
Rooms: `servers`, `history`, `preflight`, `run`, `tune`, `predict`, `verbs`.
"""
