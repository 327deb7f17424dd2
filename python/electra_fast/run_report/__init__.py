"""One HTML page about several runs: curves, configurations, evaluations, fine-tuning tables, samples and warnings."""
