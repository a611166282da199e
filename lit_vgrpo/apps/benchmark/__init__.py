"""Benchmarks: prompts and protocols that papers report, scores of several models, and a table with intervals."""
