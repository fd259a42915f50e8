"""How do files become batches of prepared rows, in an order that can be repeated? No Prefect, no MLflow.

Rooms in the order of the data: `columns` and `files` (what there is), `formats`, `read`, `preprocess`, `materialize`,
`shuffle`, `feed`.
Public: `open_feed` (for programs of your own, docs/feed.md: `from penstock import open_feed`), `spec` (what a file may say),
`manifest` (a cached dataset), `schema`, `ray_tasks`.
"""
