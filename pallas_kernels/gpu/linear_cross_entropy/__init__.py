"""Linear cross entropy on NVIDIA's Hopper: row statistics, gradients, and the operators of a split vocabulary."""
