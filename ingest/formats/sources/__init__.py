"""How do the rows of a table at one version, or the answer to a query, become files?

They are written to the storage once, as Arrow, and read like any other (`kept`): every process reads
the same rows, and the table may change meanwhile. A table that is nothing but Parquet files is read as these.
A plug-in. Public: one module a format, named in `penstock.ingest.formats.registry`.
"""
