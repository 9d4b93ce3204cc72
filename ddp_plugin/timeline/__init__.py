"""Where the time of a step goes, on every rank: written down, added up, compared, drawn."""
