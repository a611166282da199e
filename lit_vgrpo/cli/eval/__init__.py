"""``lightning eval``: scores of a run's weights on held-out prompts."""
