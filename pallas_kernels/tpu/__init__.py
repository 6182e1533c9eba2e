"""What the kernels for TPUs share: their arguments and grids, and the arithmetic of one block."""
