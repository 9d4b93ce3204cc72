"""When each gradient of a model becomes ready: one real forward and backward with a clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ddp_plugin.errors import check_count, explain
from ddp_plugin.planning.overlap import Gradient

__all__ = ["Trace", "assume_trace", "repeated", "trace_step"]


@dataclass(frozen=True)
class Trace:
    """One forward and backward of one process, without communication.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the backward.
        gradients: what becomes ready, and when.
        is_measured: whether a clock ran; else the backward is assumed to spend its time evenly over the parameters.
        num_micro_batches: of an optimizer step; all but the last one's backward count as forward.
    """

    forward_s: float
    backward_s: float
    gradients: tuple[Gradient, ...]
    is_measured: bool
    num_micro_batches: int = 1


def trace_step(module: nn.Module, loss: Callable[[], Tensor], num_repeats: int = 3) -> Trace:
    """Runs the step and notes when each gradient is ready.

    Args:
        module: whose parameters count, on the device on which they will train; their gradients are thrown away.
        loss: runs the forward on a batch of the size that one process will have, and returns the loss.
        num_repeats: how often; one more goes first and does not count. Each time is the median.

    Raises:
        ValueError: no parameter is trainable, or none got a gradient.

    Collectives:
        None.
    """
    check_count("num_repeats", num_repeats, 1)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    seen: dict[str, list[float]] = {name: [] for name in parameters}
    forwards_s: list[float] = []
    backwards_s: list[float] = []
    began_s = 0.0

    def note(name: str) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            seen[name].append(_now_s(parameter.device) - began_s)

        return ready

    handles = [
        p.register_post_accumulate_grad_hook(note(name))  # type: ignore[no-untyped-call]
        for name, p in parameters.items()
    ]
    try:
        for _ in range(1 + num_repeats):
            module.zero_grad(set_to_none=True)
            device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
            start_s = _now_s(device)
            value = loss()
            began_s = _now_s(device)
            value.backward()  # type: ignore[no-untyped-call]
            forwards_s.append(began_s - start_s)
            backwards_s.append(_now_s(device) - began_s)
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
    times_s = {name: times[-num_repeats:] for name, times in seen.items() if times}
    if not times_s:
        raise ValueError(
            explain("a loss that gives parameters gradients", "none with a gradient", "Return the training loss")
        )
    gradients = tuple(
        Gradient(name, parameters[name].numel(), parameters[name].nbytes, statistics.median(times))
        for name, times in times_s.items()
    )
    middle = statistics.median
    return Trace(middle(forwards_s[1:]), middle(backwards_s[1:]), gradients, is_measured=True)


def assume_trace(sizes: dict[str, int], element_size_bytes: int, forward_s: float, backward_s: float) -> Trace:
    """Makes a trace of parameters whose gradients become ready last first, at the times of their shares of the whole.

    Args:
        sizes: elements by name, in the order of the forward.
        element_size_bytes: bytes of one element of a gradient.
        forward_s: length of the forward.
        backward_s: length of the backward.
    """
    total, done, gradients = sum(sizes.values()), 0, []
    for name, size in reversed(sizes.items()):
        done += size
        gradients.append(Gradient(name, size, size * element_size_bytes, backward_s * done / total))
    return Trace(forward_s, backward_s, tuple(gradients), is_measured=False)


def repeated(trace: Trace, num_micro_batches: int) -> Trace:
    """Returns the trace of a step that accumulates: only the last micro-batch's backward has gradients to send.

    Args:
        trace: of one micro-batch.
        num_micro_batches: of an optimizer step.
    """
    before_s = (num_micro_batches - 1) * (trace.forward_s + trace.backward_s)
    return replace(trace, forward_s=before_s + trace.forward_s, num_micro_batches=num_micro_batches)


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the clock of the device is what counts; a trace is no training
    return time.perf_counter()
