"""Optimizers and learning-rate schedules, by options or by class."""
