"""Optimizers of the recipes: which parameters decay, and the fused kernels where there are some."""

from typing import Any

import torch
from torch import nn

__all__ = ["decay_groups", "make_adamw", "make_sgd"]

# Every other norm of torch has one-dimensional parameters, which the number of dimensions excludes already.
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the trainable parameters into those that decay and those that do not.

    Matrices, convolution kernels and embeddings decay. Biases, gains and everything else with fewer than two dimensions
    do not, nor does any parameter of a norm: pulling a gain towards zero changes what the network computes without
    limiting its capacity (He et al. 2019, "Bag of Tricks for Image Classification with CNNs", section 3.1).

    Args:
        module: any module; a parameter used in several places counts once, frozen ones not at all.
        weight_decay: coefficient of the decaying group.

    Returns:
        Parameter groups for a torch optimizer, named ``"decay"`` and ``"no_decay"``; an empty one is left out.

    Collectives:
        None.
    """
    decays: dict[nn.Parameter, bool] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            if parameter.requires_grad:
                wanted = parameter.ndim >= 2 and not isinstance(owner, _NORMS)
                decays[parameter] = decays.get(parameter, True) and wanted
    groups = [
        {"name": "decay", "params": [p for p, yes in decays.items() if yes], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p, yes in decays.items() if not yes], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_adamw(
    module: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Returns AdamW (Loshchilov and Hutter 2019) over :func:`decay_groups`, fused on CUDA.

    Collectives:
        None.
    """
    groups = decay_groups(module, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=_on_cuda(groups))


def make_sgd(
    module: nn.Module, learning_rate: float, weight_decay: float, momentum: float = 0.9, nesterov: bool = True
) -> torch.optim.SGD:
    """Returns SGD with momentum over :func:`decay_groups`, fused on CUDA.

    Collectives:
        None.
    """
    groups = decay_groups(module, weight_decay)
    return torch.optim.SGD(
        groups, lr=learning_rate, momentum=momentum, nesterov=nesterov and momentum > 0, fused=_on_cuda(groups)
    )


def _on_cuda(groups: list[dict[str, Any]]) -> bool:
    return all(parameter.is_cuda for group in groups for parameter in group["params"])
