"""What does this machine and process give and take: caches kept on it, signals, the identity of a process?"""
