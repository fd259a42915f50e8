"""How does a LightningModule train in the pipeline? Its Trainer runs the loop; rows, checkpoints and charts are penstock's.

Public: `framework`, `loading` (without Ray). Lightning has two names, `lightning` and `pytorch_lightning`; the user's class
decides which is imported.
"""
