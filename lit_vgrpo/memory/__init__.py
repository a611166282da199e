"""Memory that a step takes, and the micro-batch size that fits."""
