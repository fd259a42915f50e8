"""How does the driver run one attempt at training on Ray, as a group of Ray Train or as one task?

Words: a *worker* is one rank's process; the *mailbox* carries events to the driver and a stop back.
Public: `trainer` (driver), `worker` (rank).
"""
