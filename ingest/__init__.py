"""Data: sources, transforms, cached datasets, sample order and the feed. Plain Python and Ray Data; no Prefect, no MLflow."""
