"""Which trials does a sweep make, which does it end early, and what does it remember? Decisions and records only."""
