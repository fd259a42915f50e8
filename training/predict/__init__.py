"""How are all rows of a source scored by a registered model, each once, although runs may be killed and repeated?

Words: a *unit* is what is scored and committed together: a file, or where a file is one row a group of files. Its rows are a
*part*, a Parquet file of the output; those that cannot be scored go to the *side table*. Its *record*, written last, makes the
part count. A plug-in, with `penstock.flows.predict`.
Public: `asked` (model and rows), `score` (in the driver), `unit` (in a worker), `output` (the output folder).
"""
