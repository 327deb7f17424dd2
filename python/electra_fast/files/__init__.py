"""Files that appear whole or not at all, JSON files, and folders of checkpoints."""
