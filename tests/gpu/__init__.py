"""Checks for a machine with one CUDA device; ``make test-gpu`` runs them, and they are skipped elsewhere."""
