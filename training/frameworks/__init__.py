"""Which frameworks can train, and what is the work of each?

A *framework* trains the code that `train.recipe` names; keys, ledger, feeds, the commit of checkpoints, metrics, tracking and
registration are the same for all. Public: `framework` (the protocol), `in_process` (a base for models that learn in one
process), `on_workers` (a base for those that train on workers of Ray), `registry` (names), a folder for each.
"""
