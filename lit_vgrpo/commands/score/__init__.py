"""``lightning score`` and ``lightning check-reward``: rewards on image files, before a long run."""
