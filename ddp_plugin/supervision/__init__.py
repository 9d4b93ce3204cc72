"""What every process tells the others while it works, so that one that fails or hangs is noticed and named."""
