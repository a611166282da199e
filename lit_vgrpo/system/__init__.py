"""Files, the hub, signals, standard streams and the machine's memory."""
