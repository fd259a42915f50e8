"""How does a function written for Ray Train run in the pipeline, with no edit? `train.loop: file.py:train_func`.

Ray Train's own workers call it; its calls of Ray (`get_dataset_shard`, `report`, `get_checkpoint`, ...) get rows of penstock's
feed and penstock's checkpoints (training/session/).
Public: `framework` (what the pipeline calls), `loading` (the model again, without Ray).
"""
