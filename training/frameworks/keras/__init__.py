"""How does a compiled Keras model train in the pipeline? In one worker, step by step on penstock's rows.

Public: `framework` (what the pipeline calls), `loading` (a trained model again, without Ray).
"""
