"""``lightning score`` and ``lightning check-reward``: rewards on image files."""
