"""Draws the bytes of a hybrid's chunk against its tokens: `python docs/pictures/hybrid_bytes.py` from the checkout's
root, from the layouts of Qwen3.5 and of the full-attention models beside it.
"""

from pathlib import Path

from evals.bench.hybrid_bytes import describe_bytes, draw_bytes

if __name__ == "__main__":
    draw_bytes(describe_bytes(), Path(__file__).with_suffix(".png"))
