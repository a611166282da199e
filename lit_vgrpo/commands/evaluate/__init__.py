"""``lightning eval``: what a run's weights are worth on held-out prompts."""
