"""What does a run need around its stages: decisions, checks before anything is spent, repair, and words for people?"""
