"""``lightning export``: a run's weights as diffusers reads them."""
