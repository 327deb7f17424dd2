"""What depends on the device: settings that are chosen on it, kernels, memory, FLOPs, CUDA graphs."""
