"""Files, the hub, signals, standard streams and memory of the machine."""
