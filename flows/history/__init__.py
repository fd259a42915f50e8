"""Render the record of a run as one page that needs no network; all values are escaped.

Public: `report` (the contents), `render` (the HTML).
"""
