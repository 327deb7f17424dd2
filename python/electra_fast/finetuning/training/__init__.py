"""Training of the tasks: a job per task, a run per seed, and the step."""
