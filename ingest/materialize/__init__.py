"""How are prepared rows kept between preparation and training?

Words: a *unit* is what is committed at once; a *shard* is one file of a cached dataset; the *manifest*, written last, makes the
dataset exist. Public: `build` (on disk), `without_disk` (in memory, or not at all), `shard_file`.
"""
