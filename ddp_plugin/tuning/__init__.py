"""Settings chosen by short measured runs of the user's own training."""

from ddp_plugin.tuning.choice import Candidate, Row, Spread, Tuning
from ddp_plugin.tuning.tuner import tune

__all__ = ["Candidate", "Row", "Spread", "Tuning", "tune"]
