"""How does user code travel to a Ray worker, with a key that covers what it reaches?

Words: a *target* is what the pipeline file names (`model.py:Net`); its *closure* is the definitions that it reaches.
Public: `capture` (code as it travels), `closure` (its key), `files` (other files that it depends on), `package` (its import),
`source` and `imports` (reading Python source).
"""
