"""In which order does training see the rows?

Words: an *order* is arithmetic on (seed, epoch, number of rows); a *window* is what `windowed` shuffles within; a *pool* is
the rows that are sorted by length together; a *draw* is a row that sampling takes. Public: `order`, `sampling`,
`length_pools`.
"""
