"""How is one optimizer step computed, the same on one rank or many?

A *step* is one optimizer step over one global batch. Public: `learner`.
"""
