"""How does a training loop that penstock did not write run with penstock's rows, checkpoints and charts?

A user's function for Ray Train, the trainers of Lightning and transformers, and models that learn batch by batch (Keras, a
package's own) report to one `Session`. Public: `attempt` (one rank of an attempt), `session` (rows, checkpoints, reports).
"""
