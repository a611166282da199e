"""Recipes: read, merged with overrides, and checked against the constructors' signatures."""
