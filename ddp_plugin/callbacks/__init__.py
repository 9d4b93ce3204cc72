"""One callback a file; each works without arguments, and with these without the others."""

import lightning.pytorch as pl

from ddp_plugin.callbacks.auto_resume import AutoResume
from ddp_plugin.callbacks.communication_monitor import CommunicationMonitor
from ddp_plugin.callbacks.convert_sync_batchnorm import ConvertSyncBatchNorm
from ddp_plugin.callbacks.decision_sync import DecisionSync
from ddp_plugin.callbacks.exact_evaluation import ExactEvaluation
from ddp_plugin.callbacks.gather_predictions import GatherPredictions
from ddp_plugin.callbacks.global_mean_loss import GlobalMeanLoss, log_weight, normalize_gradients
from ddp_plugin.callbacks.gradient_noise_scale import GradientNoiseScale
from ddp_plugin.callbacks.hang_watchdog import HangWatchdog
from ddp_plugin.callbacks.per_rank_seed import PerRankSeed
from ddp_plugin.callbacks.replica_consistency import ReplicaConsistency
from ddp_plugin.callbacks.sampler_epoch import SamplerEpoch
from ddp_plugin.callbacks.scale_learning_rate import ScaleLearningRate
from ddp_plugin.callbacks.straggler_monitor import StragglerMonitor
from ddp_plugin.errors import explain

__all__ = [
    "AutoResume",
    "CommunicationMonitor",
    "ConvertSyncBatchNorm",
    "DecisionSync",
    "ExactEvaluation",
    "GatherPredictions",
    "GlobalMeanLoss",
    "GradientNoiseScale",
    "HangWatchdog",
    "PerRankSeed",
    "ReplicaConsistency",
    "SamplerEpoch",
    "ScaleLearningRate",
    "StragglerMonitor",
    "default_callbacks",
    "log_weight",
    "normalize_gradients",
]


def default_callbacks(*yours: pl.Callback) -> list[pl.Callback]:
    """Returns the callbacks that every run should have; none of them changes a number that was right before.

    They are :class:`SamplerEpoch`, :class:`PerRankSeed`, :class:`ExactEvaluation`, :class:`DecisionSync` and
    :class:`ReplicaConsistency`, each with its defaults.

    Args:
        *yours: callbacks that take the place of the default of their class, such as ``SamplerEpoch("exact")``; others
            are added at the end.

    Raises:
        TypeError: something that is no callback, such as a class or a list of them.
    """
    for callback in yours:
        if not isinstance(callback, pl.Callback):
            raise TypeError(explain("callbacks, one by one", repr(callback), "Write default_callbacks(SamplerEpoch())"))
    defaults = (SamplerEpoch, PerRankSeed, ExactEvaluation, DecisionSync, ReplicaConsistency)
    callbacks: list[pl.Callback] = []
    for cls in defaults:
        callbacks += [callback for callback in yours if isinstance(callback, cls)] or [cls()]
    return callbacks + [callback for callback in yours if not isinstance(callback, defaults)]
