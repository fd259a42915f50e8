"""What is on record of runs and stages, by which key is it found again, and what has changed since?

Words: a *run* is one undertaking with all its attempts; an *attempt* is one command that worked on it; a *stage key* is the
digest of all that a stage's output depends on.
Public: `keys` (the key of each stage), `ledger` (the records), `changes` (what differs between two of them).
"""
