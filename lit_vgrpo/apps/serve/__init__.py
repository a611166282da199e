"""``lightning serve-reward``: a reward behind HTTP, for runs on other machines."""
