"""How do words become numbers, without an index for each? Cleaned, hashed into buckets, and lists of words as one vector."""
