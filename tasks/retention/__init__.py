"""Which data of a storage does nothing that is kept refer to, and how are they deleted?

Words: `retention` decides which runs are *kept*; one that is not is *cleaned*: its data go, its small records stay.
Public: `plan` (what can be deleted, decides only), `inventory` (what lies in a storage), `clean` (deletes).
"""
