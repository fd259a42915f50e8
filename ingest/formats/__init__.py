"""How does a file of one format become tables of rows?

Words: a *format* says which files and options it has and what its columns mean; its *reader* reads the files; *facts* are
columns and rows of one file. Public: `registry` (name to format), `section` (what a pipeline file may say), `format` and
`reader` (the protocols). One file for each format; docs/extend/format.md adds one from outside.
"""
