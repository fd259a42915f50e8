"""What of a checkpoint has a user's own loop put back, as far as that can be seen?

Words: *a moment* is when a loop takes its first batch after a report or a start, or makes its first optimizer step; *to stand*
is to have a state at one.
Public: `restored` (was the checkpoint asked for and opened), `witness` (does the loop stand where it stood).
"""
