"""Ranks and strategies: what is gathered, how weights are sharded, and how checkpoints stay portable."""
