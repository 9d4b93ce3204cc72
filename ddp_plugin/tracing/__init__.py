"""A window of a run, written down by every rank and joined to one page by whoever started it."""
