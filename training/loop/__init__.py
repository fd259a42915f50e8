"""How does training run from a state to the end, on every rank alike?

Words: an *observer* is what the loop tells and asks; the *first* rank writes, charts and obeys a stop.
Public: `loop`, `observer`, `rank_zero`.
"""
