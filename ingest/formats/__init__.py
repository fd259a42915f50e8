"""How does a file of one format become tables of rows?

Words: a *reader* reads all files of a format; its *facts* are columns and rows of one file. Public: `registry` (name to
reader), `reader` (the protocol). One file for each format.
"""
