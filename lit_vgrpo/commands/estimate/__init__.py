"""How much memory a recipe needs, from configuration files alone."""
