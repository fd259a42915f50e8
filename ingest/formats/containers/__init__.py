"""How do files that hold samples in a form of their own become tables?

Words: a *member* is a file within an archive, a *sample* the members that belong together. Public: one module a format, named
in `penstock.ingest.formats.registry`. A library that only one format needs is an extra, imported when a file is read.
"""
