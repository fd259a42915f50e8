"""Which frameworks can train, and what is the work of each?

A *framework* trains the code that `train.recipe` names; keys, ledger, feeds, the commit of checkpoints, metrics, tracking and
registration are the same for all. Public: `framework` (the protocol), `on_workers` (a base for those that train on workers of
Ray), `loops` (bases for those with a loop of their own), `registry` (names), a folder for each.
"""
