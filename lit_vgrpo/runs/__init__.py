"""One run on disk and in time: its folder, checkpoints, metrics, and the ranks that take part."""
