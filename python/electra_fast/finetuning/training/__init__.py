"""Training of tasks: one job per task, one run per seed, and the training step."""
