"""Update rules, the optimizer that applies one, and the shards of a sharded model."""
