"""Mathematics and types that all other packages use: torch, no Lightning."""
