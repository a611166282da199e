"""Memory that a recipe needs, from configuration files alone."""
