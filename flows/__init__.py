"""How are the stages run as a Prefect flow and from the command line?

Public: `pipeline` (the flow), `spec_file` (a checked spec from a YAML file), `cli` (the `penstock` command;
`options` has common arguments of its verbs, `answer` their output).
Rooms: `servers`, `preflight`, `run`, `verbs`; and those of plug-ins: `history`, `retention`, `deploy`, `given`, `tune`,
`predict`.
"""
