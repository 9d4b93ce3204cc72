"""Checkpoints: written whole or not at all, sealed with a hash, read once for all ranks, and found again."""

from ddp_plugin.checkpoints.files import verify
from ddp_plugin.checkpoints.finding import newest_checkpoint
from ddp_plugin.checkpoints.manifest import Manifest, NewerFormatError
from ddp_plugin.checkpoints.reading import DamagedCheckpointError, RefusedCheckpointError, read

__all__ = [
    "DamagedCheckpointError",
    "Manifest",
    "NewerFormatError",
    "RefusedCheckpointError",
    "newest_checkpoint",
    "read",
    "verify",
]
