"""What does a training worker read?

| size | what it is | unit |
|---|---|---|
| batch | rows of one step, of all ranks (*global*) or one | rows |
| group | batches gathered ahead together | bytes (`GROUP_BYTES`) |
| shard | one file of the cached dataset: fetched and evicted at once | bytes |
| unit | source files prepared and committed together | bytes of source |
| window | rows among which `windowed` shuffles | rows |
| pool | steps whose rows are sorted by length together | batches |

Words: *epoch* and *position* (rows consumed by all ranks) say where a feed is; the *share* of a rank is its part of every
global batch. Public: `batch` (what a feed gives), `cached`, `memory`, `stream` (three feeds), `cursor` (their state).
"""
