"""Reports on a model's answers: numbers, examples and pictures, from gold labels and answers alone."""
