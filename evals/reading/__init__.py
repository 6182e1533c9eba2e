"""Pages of text as images before a pretrained decoder: SmolVLM's layout, SmolLM2, and a small tower trained here.

The tower gives, for each word piece that is drawn in a cell of a page, the decoder's own embedding of that piece.
"""
