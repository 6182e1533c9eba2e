"""Agents' recorded episodes as an evaluation: what keeping a window, or dropping it, costs and loses at every step."""
