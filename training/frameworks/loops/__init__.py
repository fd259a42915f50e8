"""What is the same for frameworks that train by a loop of their own in penstock's ranks? A plug-in that others build on.

Public: `own_loop` (a framework by a function `fit`, or by a model that learns batch by batch), `steps` (epochs of batches,
when to save, the loop of such a model).
"""
