"""Which figures does an evaluation have? A plug-in: evaluation names its module as text.

Public: `figures`.
"""
