"""Which trials does a sweep make, and which does it remember? Decisions and records only.

Word: a *trial* is one run of a sweep with values of its own.
A plug-in, with `penstock.flows.tune`.
Public: `spec` (what a file may say), `search` (the next values), `record`.
"""
