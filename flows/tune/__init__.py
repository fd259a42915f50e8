"""How is a sweep made? A flow performs trials of one pipeline side by side in one Ray cluster, and runs the best to its end."""
