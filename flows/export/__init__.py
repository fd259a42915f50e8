"""How do other tools read the prepared rows of a run?

A plug-in, built on `history`. Public: `command` (the verb), `export`.
"""
