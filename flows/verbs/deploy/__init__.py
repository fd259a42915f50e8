"""Put a pipeline on a schedule, and send messages when it fails.

Public: `deploy`, `notify`.
"""
