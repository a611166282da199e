"""Builds module, data and trainer from a recipe, and trains them."""
