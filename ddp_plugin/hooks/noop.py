"""No communication at all: what a step would take if the wire were infinitely fast. For measuring only."""

import torch

from ddp_plugin.errors import explain
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import DirectExchange, done
from ddp_plugin.hooks._record import CommHook

__all__ = ["Nothing", "noop"]


class Nothing(DirectExchange):
    """Leaves every rank's values as they are."""

    takes_sparse = True

    def start(self, values: torch.Tensor, contents: Contents) -> torch.futures.Future[torch.Tensor]:
        """Returns a future that is done.

        Collectives:
            None.
        """
        return done(values)


def _no_bytes(contents: Contents, world_size: int, rank: int) -> int:
    return 0


def _no_bound(gradients: torch.Tensor, contents: Contents) -> torch.Tensor:
    return torch.full((1, gradients.shape[1]), torch.inf, dtype=torch.float64)


def noop(for_measuring: bool = False) -> CommHook:
    """No exchange: every rank trains a model of its own, and only the time of a step means anything.

    Args:
        for_measuring: that you know this; without it nothing is trained.

    Collectives:
        None.
    """
    refusal = explain(
        "a hook that keeps the ranks' models equal",
        "comm_hook='noop', with which every rank trains a model of its own",
        "To measure what a step takes without communication write {'name': 'noop', 'for_measuring': True}",
    )
    return CommHook(
        "noop",
        Nothing,
        wire_bytes=_no_bytes,
        error_bound=_no_bound,
        is_direct=True,
        exchanges_nothing=True,
        refusal=None if for_measuring else refusal,
        options={"for_measuring": for_measuring},
    )
