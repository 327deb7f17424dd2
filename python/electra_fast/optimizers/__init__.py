"""Optimizers: one file per update rule, the contract that rules share, and the optimizer that applies one of them."""
