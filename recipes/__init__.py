"""Recipes, prompt files and tiny pipelines, shipped as data."""
