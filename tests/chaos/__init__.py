"""Runs of a recipe that are killed again and again, and what is left of them when the last one ends."""
