"""Which frameworks can train, and what does each do for the pipeline?

Words: a *framework* trains what `train.recipe` names; keys, ledger, feeds, the commit of checkpoints, metrics, tracking and
registration come from outside, the same for all. Public: `framework` (the protocol), `in_process` (most of one
whose model learns in the driver), `registry` (names), a folder for each.
"""
