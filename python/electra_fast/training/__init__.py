"""From an open run to checkpoints, metrics and plots: the training loop, its step and optimizer, evaluation, FLOPs."""
