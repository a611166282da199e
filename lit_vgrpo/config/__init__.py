"""Recipes: reading, merging, and building of their parts, with one-line errors."""
