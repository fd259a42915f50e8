"""Are rows of text parsed once, though several passes read them? A plug-in: without it they are parsed again.

Public: `rows`.
"""
