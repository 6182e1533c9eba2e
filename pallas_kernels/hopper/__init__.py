"""What the kernels for Hopper GPUs share: how a launch is cut up, its arrays, and the work of one block."""
