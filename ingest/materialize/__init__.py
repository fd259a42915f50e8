"""How are prepared rows kept between preparation and training?

A *unit* is committed as a whole; a *shard* is one file of a cached dataset; the *manifest*, written last, completes the
dataset. Public: `build` (on disk), `without_disk` (in memory, or streamed), `shard_file`.
"""
