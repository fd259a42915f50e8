"""How is the record of a run rendered as a page? One file that needs no network; all values are escaped.

Public: `report` (the contents), `render` (the HTML).
"""
