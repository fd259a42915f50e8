"""What is done with a finished model besides measuring and registering it: its held-out rows, their slices, and the alias?

Words: a *slice* is the held-out rows that share a value in the source; the *holder* is the version that has the alias.
Public: `held_out`, `alias` (whether it moves).
"""
