"""Who hands out shuffled batches, each with its best settings, and how is one measured?"""
