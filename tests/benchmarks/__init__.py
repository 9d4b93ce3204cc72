"""What the package costs, as ratios: each pair is timed on the same machine, in the same processes, in turn."""
