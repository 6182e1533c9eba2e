"""Shapes that tests and benchmarks share: a chunk as rotate_patch takes it, and the pool it is written into."""

from typing import NamedTuple

from ..rotate_patch import shapes as rotate_patch_shapes
from ..rotate_patch.shapes import RotateShape


class SpliceShape(NamedTuple):
    """One case: the chunk, and a pool [*leading, pages, page_size, heads, width]."""

    chunk: RotateShape
    pages: int
    page_size: int

    @property
    def name(self) -> str:
        """The chunk's name."""
        return self.chunk.name

    @property
    def pool(self) -> tuple[int, ...]:
        """The pool's shape."""
        return (*self.chunk.leading, self.pages, self.page_size, self.chunk.heads, self.chunk.width)


PAGING = ((5, 4), (6, 3), (4, 8), (7, 2), (3, 16), (4, 4), (5, 2))
SMALL = tuple(SpliceShape(chunk, *paging) for chunk, paging in zip(rotate_patch_shapes.SMALL, PAGING, strict=True))

LANES = (
    SpliceShape(RotateShape("heads", (2,), 37, 2, 128, 128, 3, "half"), 5, 16),
    SpliceShape(RotateShape("one_head", (2,), 40, 1, 128, 64, 3, "pairs"), 6, 32),
    SpliceShape(RotateShape("latent", (1,), 19, 1, 256, 0, 5, "half"), 3, 64),
)
"""Small, and as wide as the lanes of a TPU, which its kernel asks for."""

PADDED = RotateShape("kimi_vl_rope_padded", (27,), 1088, 1, 128, 64, 32, "half")
"""The rope key in 128 lanes, as engines for TPUs store it."""

PRODUCTION = tuple(SpliceShape(chunk, 256, 64) for chunk in (*rotate_patch_shapes.PRODUCTION, PADDED))
