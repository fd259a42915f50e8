"""In which order does training see the rows?

An *order* is computed from (seed, epoch, number of rows); `windowed` shuffles within a *window*; the rows of a *pool* are
sorted by length together; sampling takes a row with each *draw*. Public: `order`, `sampling`, `length_pools`.
"""
