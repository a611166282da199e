"""The mathematics and the types that everything else stands on: torch, no Lightning."""
