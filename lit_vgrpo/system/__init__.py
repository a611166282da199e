"""Files, the hub, signals, the process and the memory of the machine."""
