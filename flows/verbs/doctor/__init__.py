"""Would a run work here, and if not, what is the next command?"""
