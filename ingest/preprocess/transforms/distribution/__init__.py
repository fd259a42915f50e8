"""How do numbers of a skewed distribution come to an even or normal one? By what the train split's values look like."""
