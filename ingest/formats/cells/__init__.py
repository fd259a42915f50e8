"""What do the cells of a text file hold: which type, and how is that known without reading each one closely?

Public: `cell_types` (the type of a column), `cell_bytes` (what a few bytes rule out).
"""
