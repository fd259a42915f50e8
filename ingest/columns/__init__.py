"""How does an Arrow column become numbers of one type and shape, and which error names one that cannot?

Words: a *column* is an Arrow array of one name; its *type* is written as text in snapshots and pipeline files (`type_text`); a
column is *ragged* where its lists have a length of their own in each row, and *encoded* where it holds images as files.
Public: `casts` (promotion and casts), `fixed_shape`, `extension_types`, `arrays` (numpy to Arrow and back), `images`.
"""
