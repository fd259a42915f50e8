"""How do words become numbers, without an index for each? Cleaned, hashed into buckets, and lists of words as one vector.

Public: one module a transform: `clean_text`, `hashing`, `multi_hot`.
"""
