"""``lightning check --memory``: the memory that a recipe needs, computed without weights."""
