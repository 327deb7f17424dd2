"""Atomic files, JSON files, and folders of checkpoints."""
