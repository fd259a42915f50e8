"""Which files does a source consist of, and how is one opened?

Words: a *source* is what `data.train` and its like name; a *file* is one of it with its size and fingerprint; a *unit* is a
group of files that is prepared and committed together. Public: `listing`, `unchanged`, `opening`, `content_digests`,
`unit_plan`.
"""
