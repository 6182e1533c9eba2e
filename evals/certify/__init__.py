"""Certificates: what every way of serving a chunk loses on a backbone, with bounds that were tested on other windows.

`windows` lists what is measured on, `lines` prefills and serves it, `modes` are the ways of serving, `scores` makes
bounds of what they lose, `mixtures` tests the bounds where ways are mixed, and `certification` joins all of it.
"""
