"""How does one optimizer step happen, the same on one rank or many?

Words: a *step* is one optimizer step over one global batch. Public: `learner`.
"""
