"""Data: files, formats, snapshots, preprocessing, cached datasets, sample order and the feed. No Prefect, no MLflow.

Rooms in the order of the data: `columns` and `files` (what there is), `formats`, `read`, `preprocess`, `materialize`,
`shuffle`, `feed`. For programs of your own: `from penstock import open_feed, FeedDataset` (docs/feed.md).
"""
