"""How does a run, or a comparison of two, look as a page? One file that needs no network; texts from outside are escaped."""
