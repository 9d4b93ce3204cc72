"""One callback a file; each works without the others and without arguments."""
