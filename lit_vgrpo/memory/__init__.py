"""How much memory a step takes, and the micro-batch size that fits."""
