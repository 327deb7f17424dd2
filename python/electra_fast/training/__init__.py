"""Training of a run: the loop, its step, evaluation, checkpoints, metrics, plots and plans."""
