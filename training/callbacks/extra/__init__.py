"""Which callbacks does penstock bring that few need? A plug-in: the registry of callbacks alone knows its modules.

Public: `averages`.
"""
