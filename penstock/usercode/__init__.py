"""How does user code travel to a Ray worker, with a key that knows what it reaches?

Words: a *target* is what the pipeline file names (`model.py:Net`); its *closure* is the definitions and files that it reaches.
Public: `capture` (code as it travels), `closure` (its key), `definitions` (its source, definition by definition),
`package` (its import), `needed_files`, `secret_files`. The other modules read Python source for them.
"""
