"""Command-line options and recipes: parsing, merging, and checks against the constructors' signatures."""
