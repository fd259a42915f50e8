"""What is done with a finished model besides measuring and registering it: its held-out rows, their slices, and the alias."""
