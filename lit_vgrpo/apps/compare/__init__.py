"""``lightning compare``: training methods raced against each other from the same start."""
