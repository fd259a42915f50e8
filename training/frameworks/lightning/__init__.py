"""How does a LightningModule train in the pipeline? Lightning's Trainer runs the loop; rows, checkpoints and charts are ours.

Public: `framework` (what the pipeline calls), `loading` (a trained module again, without Ray). Lightning has two names,
`lightning` and `pytorch_lightning`; the one that the user's class is of is used, and neither is imported before that class is.
"""
