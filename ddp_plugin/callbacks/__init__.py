"""One callback a file; each works without the others and without arguments."""

import lightning.pytorch as pl

from ddp_plugin.callbacks.convert_sync_batchnorm import ConvertSyncBatchNorm
from ddp_plugin.callbacks.exact_evaluation import ExactEvaluation
from ddp_plugin.callbacks.gather_predictions import GatherPredictions
from ddp_plugin.callbacks.per_rank_seed import PerRankSeed
from ddp_plugin.callbacks.sampler_epoch import SamplerEpoch
from ddp_plugin.callbacks.scale_learning_rate import ScaleLearningRate

__all__ = [
    "ConvertSyncBatchNorm",
    "ExactEvaluation",
    "GatherPredictions",
    "PerRankSeed",
    "SamplerEpoch",
    "ScaleLearningRate",
    "default_callbacks",
]


def default_callbacks() -> list[pl.Callback]:
    """Returns the callbacks that every run should have; none of them changes a number that was right before.

    They are :class:`SamplerEpoch`, :class:`PerRankSeed` and :class:`ExactEvaluation`, each with its defaults.
    """
    return [SamplerEpoch(), PerRankSeed(), ExactEvaluation()]
