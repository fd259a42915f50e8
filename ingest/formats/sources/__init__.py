"""How do rows from elsewhere become files? The result of a function, a table at one version, the answer to a query.

They are written to the storage once, as Arrow, and read like any other: every process reads the same rows, and the table may
change meanwhile. A table that is nothing but Parquet files is read as these.
Public: `kept`, and one module a format, named in `penstock.ingest.formats.registry`.
"""
