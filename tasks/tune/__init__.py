"""Which trials does a sweep make, which does it end early, and what does it remember? Decisions and records only.

Words: a *trial* is one run of a sweep with values of its own; a *report* is the metric of a trial at one step.
A plug-in, with `penstock.flows.tune`.
Public: `spec` (what a file may say), `search` (the next values, and early ends), `record`.
"""
