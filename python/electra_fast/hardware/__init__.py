"""Everything that depends on the device: settings chosen for it, kernels, memory, FLOPs, CUDA graphs."""
