"""How does a Hugging Face model train in the pipeline? The transformers Trainer, on penstock's rows and in its ranks.

Public: `framework`, `loading` (without Ray).
"""
