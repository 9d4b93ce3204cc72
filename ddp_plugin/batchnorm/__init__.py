"""BatchNorm whose statistics are those of the global batch, and a conversion that loses nothing.

A converted layer is the same object: only its class is exchanged for a subclass of the class it had. Parameters,
buffers, hooks, attributes, training flag, names in the ``state_dict`` and references held elsewhere are untouched, and
giving the layer back is setting the class back.
"""

from ddp_plugin.batchnorm.convert import BatchNormFactory, Conversion, convert_batchnorm
from ddp_plugin.batchnorm.kernels import batch_norm_input_gradient, combine_moments, local_moments
from ddp_plugin.batchnorm.layers import SyncedBatchNorm, SyncedBatchNorm1d, SyncedBatchNorm2d, SyncedBatchNorm3d

__all__ = [
    "BatchNormFactory",
    "Conversion",
    "SyncedBatchNorm",
    "SyncedBatchNorm1d",
    "SyncedBatchNorm2d",
    "SyncedBatchNorm3d",
    "batch_norm_input_gradient",
    "combine_moments",
    "convert_batchnorm",
    "local_moments",
]
