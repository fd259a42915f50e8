"""How are images with more than 8 bits a channel read? A plug-in: without it they are refused.

Public: `values`.
"""
