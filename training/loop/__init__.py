"""How does training run from a state to the end, on every rank alike?

Words: an *observer* gets the loop's reports and answers whether to stop or save; the *first* rank writes and charts.
Public: `loop`, `observer`.
"""
