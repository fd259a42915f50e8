"""What does a training worker read?

| size | meaning | unit |
|---|---|---|
| batch | rows of one step, of all ranks (*global*) or one | rows |
| group | batches gathered ahead together | bytes (`GROUP_BYTES`) |
| shard | one file of the cached dataset, fetched and evicted as a whole | bytes |
| unit | source files prepared and committed together | bytes of source |
| window | rows among which `windowed` shuffles | rows |
| pool | steps whose rows are sorted by length together | batches |

*Epoch* and *position* (rows consumed by all ranks) locate a feed; the *share* of a rank is its part of every global batch.
Public: `batch` (a feed's results), `cached` and `stream` (feeds), `cursor` (their state).
"""
