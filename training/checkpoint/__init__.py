"""What does a checkpoint hold, when does it count, and which one does a run continue from?

Words: a *checkpoint* is model, optimizer and the rest of the state with the position, committed by its *manifest*,
written last; a *snapshot* is the copy that is being written; the *journal* holds the metric points up to it.
Public: `store`, `manifest`, `state_files`, `writer`, `journal`.
"""
