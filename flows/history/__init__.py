"""What is on record of a run, and how does it look as a page? One file that needs no network; what it is given is escaped.

Public: `report` (what the page says), `render` (how it becomes HTML).
"""
