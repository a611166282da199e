"""``lightning score`` and ``lightning check-reward``: what rewards say, before a long run asks them."""
