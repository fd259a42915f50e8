"""How do rows that are no files of a folder become files? What a function gives, a table at one version, a query's answer.

They are written to the storage once, as Arrow, and read like any other: every process reads the same rows, and the table may
change meanwhile. A table that is nothing but Parquet files is read as these.
Public: `kept`, and one module a format, named in `penstock.ingest.formats.registry`.
"""
