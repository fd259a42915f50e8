"""What in a storage does nothing kept refer to any more, and how is it deleted while others begin to run?

Words: a run *goes* when it is none of those that `retention` keeps; a run that has gone is *cleaned*: its small records stay.
Public: `spec` (which runs are kept), `holdings` (what lies in a storage), `plan` (what goes), `free` (deletes), `flow_runs`
(deletes what Prefect keeps).
"""
