"""``lightning sample``: images of a run's weights for prompts of one's own."""
