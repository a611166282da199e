"""Optimizers and learning-rate schedules, by their settings or by class."""
