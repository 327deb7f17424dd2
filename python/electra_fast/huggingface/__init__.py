"""Models into and out of Hugging Face folders: config.json, weights by name, tokenizer and model card."""
