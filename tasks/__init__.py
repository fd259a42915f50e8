"""One pipeline stage per file, as Prefect tasks. The work itself is in `ingest` and `training`."""
