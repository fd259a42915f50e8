"""How is the record of a run rendered as one page? It needs no network; all values are escaped.

Public: `report` (the contents), `render` (the HTML).
"""
