"""``lightning report``: a run, or several side by side, as one HTML page."""
