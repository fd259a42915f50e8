"""How do code and rows that a program holds become a project like any other? `penstock.run` with a dict, a function, frames.

A plug-in. Public: `load` (a spec with what a program gives), `code` (its functions and classes as files), `definitions` (where
they are defined).
"""
