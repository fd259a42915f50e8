"""Which data of a storage does nothing that is kept refer to, and how are they deleted?

Words: `retention` decides which runs are *kept*; one that is not is *cleaned*: its data go, its small records stay.
A plug-in, with `penstock.flows.retention`. Public: `spec` (the section), `plan` (what can be deleted, decides only),
`inventory` (what lies in a storage), `clean` (deletes).
"""
