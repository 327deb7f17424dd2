"""Export to and import from Hugging Face folders: config.json, weights, tokenizer and model card."""
