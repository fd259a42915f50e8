"""How does each stage of a pipeline run as a Prefect task? One file a stage; the work itself is in `ingest` and `training`.

Words: a *stage* is one part of the pipeline with a key and a recorded output; an *attempt* is one command that works on a run.
Public: `stages` (their names and order), `all_stages`, `stage` (how one is performed), `spec` (the pipeline file), `project`
(what was read from disk), `context` (what a stage gets). Rooms: `records`, `model`, `retention`, `tune`.
"""
