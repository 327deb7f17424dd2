"""From an open run to checkpoints, metrics and plots: the training loop, its step, evaluation, plans."""
