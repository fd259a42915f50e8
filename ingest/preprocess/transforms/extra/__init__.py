"""Which transforms does penstock bring that few need? A plug-in: the registry of transforms alone knows its modules.

Public: `flatten`, `map_rows`.
"""
