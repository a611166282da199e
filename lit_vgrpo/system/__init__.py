"""Files, the hub, signals and memory of the machine."""
