"""What is shown of a run besides its metrics? A plug-in: evaluation and rank 0's events name its modules as text.

Public: `figures` (of an evaluation), `machine_load` (charts of the machine that trains).
"""
