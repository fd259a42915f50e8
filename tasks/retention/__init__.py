"""Which data of a storage does nothing that is kept refer to, and how are they deleted?

Words: a run is *kept* or not, as `retention` says; one that is not kept is *cleaned*: its data go, its small records stay.
Public: `plan` (what can be deleted, decides only), `inventory` (what lies in a storage), `clean` (deletes).
"""
