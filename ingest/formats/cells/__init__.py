"""What do the cells and lines of a text file hold: which type, and how is that known without reading each one closely?"""
