"""DDP does not use `param.register_hook`.

Said: DDP is a hook on each parameter that averages its gradient.

True: `register_hook` sees what one backward adds, before it is added. Three micro-batches of gradient 1 show it 1, 1
and 1, so an average made there misses what was accumulated under `no_sync`. DDP waits for the gradient's *accumulator*,
as a post-accumulate hook does: 1, 2, 3.

Instead: DDP, or `ddp_plugin.hooks.attach` to change what it sends.
"""

import torch
from _start import run

NUM_RANKS = 1


def gradients_seen(register):
    w = torch.zeros((), requires_grad=True)
    seen = []
    register(w, seen)
    for _ in range(3):
        (w * 1.0).backward()
    return seen


def hook():
    """register_hook."""
    return gradients_seen(lambda w, seen: w.register_hook(lambda gradient: seen.append(gradient.item())))


def post_accumulate():
    """register_post_accumulate_grad_hook."""
    return gradients_seen(
        lambda w, seen: w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item())),
    )


def check(hook, post_accumulate):
    assert hook == [1.0, 1.0, 1.0]
    assert post_accumulate == [1.0, 2.0, 3.0]


VARIANTS = (hook, post_accumulate)

if __name__ == "__main__":
    run(__file__)
