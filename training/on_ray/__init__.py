"""How does the driver run one attempt at training on Ray Train?

Words: a *worker* is one rank's process; the *mailbox* carries events to the driver and a stop back.
Public: `trainer` (driver), `worker` (rank).
"""
