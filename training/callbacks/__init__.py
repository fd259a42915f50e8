"""What else happens while a model is trained? Callbacks: the user's, and a few of penstock's own.

Public: `callback` (what one may have, and how all of them are called), `registry` (penstock's own, by name), `loading`.
"""
