"""Optimizers: one file per update rule, their common interface, and the optimizer that applies a rule."""
