"""How does a file of one format become tables of rows?

Words: a *format* declares its files, its options and the meaning of its columns; its *reader* reads the files; *facts* are
columns and rows of one file. Public: `registry` (name to format), `section` (what a pipeline file may say), `format` and
`reader` (the protocols). One file for each format; docs/extend/format.md adds one from outside.
"""
