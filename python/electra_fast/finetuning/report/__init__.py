"""Reports on a model's answers, made from gold labels and answers: scores, examples and pictures."""
