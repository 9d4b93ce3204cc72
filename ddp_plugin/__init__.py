"""Distributed data parallel training for PyTorch Lightning that gives the numbers one process would give.

The public names are these. Importing the package registers the strategy's names with Lightning and changes nothing else
in the process.
"""

import sys

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    raise ImportError(
        "ddp_plugin works with `import lightning.pytorch`, and this program has imported `pytorch_lightning`, which is "
        "another class tree; change the import (or import lightning.pytorch first, if you really use both)."
    )

from ddp_plugin.callbacks import (
    AutoResume,
    CommunicationMonitor,
    ConvertSyncBatchNorm,
    DecisionSync,
    ExactEvaluation,
    GatherPredictions,
    GlobalMeanLoss,
    GradientNoiseScale,
    HangWatchdog,
    PerRankSeed,
    ReplicaConsistency,
    SamplerEpoch,
    ScaleLearningRate,
    StragglerMonitor,
    default_callbacks,
    log_weight,
    normalize_gradients,
)
from ddp_plugin.config import NcclOptions, StrategyConfig
from ddp_plugin.predictions import read_predictions
from ddp_plugin.strategy import CustomDDPStrategy, register_strategies
from ddp_plugin.tuning import Tuning, tune

__version__ = "0.1.0"

__all__ = [
    "AutoResume",
    "CommunicationMonitor",
    "ConvertSyncBatchNorm",
    "CustomDDPStrategy",
    "DecisionSync",
    "ExactEvaluation",
    "GatherPredictions",
    "GlobalMeanLoss",
    "GradientNoiseScale",
    "HangWatchdog",
    "NcclOptions",
    "PerRankSeed",
    "ReplicaConsistency",
    "SamplerEpoch",
    "ScaleLearningRate",
    "StragglerMonitor",
    "StrategyConfig",
    "Tuning",
    "__version__",
    "default_callbacks",
    "log_weight",
    "normalize_gradients",
    "read_predictions",
    "tune",
]

register_strategies()
