"""``lightning vote``: a page on which people choose the best image, as a reward."""
