"""One run on disk and in time: evaluation, checkpoints, strategies, optimizers, limits, logging."""
