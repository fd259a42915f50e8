"""How do source rows become rows to train on?

Words: a *transform* is one entry of `preprocess` in the pipeline file; *fitting* learns its state from the train split;
*rows* are a table on its way through the transforms, with each row's origin; a *problem* is why a row cannot be used. Public:
`transform_spec` (a transform with its options, as the pipeline file has it), `fit`, `chain` (all in order), `fitted` (their
state), and `transforms` (one file for each).
"""
