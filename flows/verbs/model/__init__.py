"""What do the verbs do that begin with a registered model?

Public: `predict`, `rollback`.
"""
