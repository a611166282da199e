"""Applications around training: each folder includes its command and can be deleted."""
