"""Fine-tuning: from a pre-trained encoder to a task's predictions and scores."""
