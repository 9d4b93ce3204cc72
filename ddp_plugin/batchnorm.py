"""BatchNorm whose statistics are those of the global batch, and a conversion that loses nothing.

A converted layer is the same object: only its class is exchanged for a subclass of the class it had. Parameters,
buffers, hooks, attributes, training flag, names in the ``state_dict`` and references held elsewhere are untouched, and
giving the layer back is setting the class back.

The file reads from the inside out: kernels on tensors, the autograd function that adds two collectives, the classes,
the conversion.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddp_plugin.errors import explain

__all__ = [
    "BatchNormFactory",
    "Conversion",
    "SyncedBatchNorm1d",
    "SyncedBatchNorm2d",
    "SyncedBatchNorm3d",
    "batch_norm_input_gradient",
    "combine_moments",
    "convert_batchnorm",
    "local_moments",
]

BatchNormFactory = Callable[[nn.Module], nn.Module]
"""``module -> synchronised module``, for a layer class of the user's own."""


# ----------------------------------------------------------------------------------------------------------- kernels


def local_moments(x: Tensor) -> Tensor:
    """Returns what one rank knows about its batch: mean, sum of squared deviations and count of every channel.

    Args:
        x: shape ``(N, C, *)``, ``N`` may be 0.

    Returns:
        Shape ``(2 * C + 1,)``: means, sums of squared deviations, count of values in a channel; float64 for a float64
        input, else float32. All zeros where the batch is empty.

    Collectives:
        None.
    """
    dtype, num_channels = _statistics_dtype(x), x.shape[1]
    if x.numel() == 0:
        return torch.zeros(2 * num_channels + 1, dtype=dtype, device=x.device)
    count = x.numel() // num_channels
    x, dims = x.to(dtype), _reduced_dims(x)
    # Two passes with the first mean's rounding corrected in the second: as stable as torch.var_mean, and several times
    # faster than it over non-adjacent dimensions on the CPU.
    rough_mean = x.mean(dims)
    centred = x - _over_channels(rough_mean, x.dim())
    rest = centred.mean(dims)
    deviations = (centred.square_().sum(dims) - count * rest.square()).clamp_(min=0)
    return torch.cat([rough_mean + rest, deviations, rest.new_full((1,), count)])


def combine_moments(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the ranks' moments into those of the global batch, without the cancellation of ``E[x²] - E[x]²``.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

    Args:
        moments: shape ``(world_size, 2 * C + 1)``, one row of :func:`local_moments` a rank.

    Returns:
        Mean ``(C,)``, biased variance ``(C,)``, count ``()`` of the global batch, in the dtype of ``moments``.

    Collectives:
        None.
    """
    num_channels = moments.shape[1] // 2
    means, deviations, counts = torch.split(moments, [num_channels, num_channels, 1], dim=1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variance = (deviations + counts * (means - mean).square()).sum(0) / count
    return mean, variance, count


def batch_norm_input_gradient(
    grad_output: Tensor, centred: Tensor, inverse_std: Tensor, weight: Tensor | None, sums: Tensor, count: Tensor
) -> Tensor:
    """Returns the gradient with respect to the input of a BatchNorm whose statistics are those of a larger batch.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015, arXiv 1502.03167, section 3.

    Args:
        grad_output: gradient of the output, shape ``(N, C, *)``.
        centred: input minus global mean, same shape.
        inverse_std: ``1 / sqrt(variance + eps)`` of the global batch, shape ``(C,)``.
        weight: scale, shape ``(C,)``, or ``None``.
        sums: over the global batch, ``sum(grad_output)`` and ``sum(grad_output * centred)``, shape ``(2, C)``.
        count: number of values in a channel of the global batch, shape ``()``.

    Collectives:
        None.
    """
    mean_grad, mean_grad_centred = sums / count
    scale = inverse_std if weight is None else inverse_std * weight.to(inverse_std.dtype)
    slope = mean_grad_centred * inverse_std.square()
    ndim = grad_output.dim()
    gradient = grad_output - _over_channels(mean_grad, ndim)
    return gradient.addcmul_(centred, _over_channels(-slope, ndim)).mul_(_over_channels(scale, ndim))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _reduced_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _over_channels(values: Tensor, ndim: int) -> Tensor:
    return values.view(1, -1, *[1] * (ndim - 2))


# ------------------------------------------------------------------------------------------------- autograd function


class _BatchNormOverRanks(torch.autograd.Function):
    """Normalises the local batch with the statistics of all ranks: one all-gather forward, one all-reduce backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moments = local_moments(x)
        rows = [torch.empty_like(moments) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, moments, group=group)
        mean, variance, count = combine_moments(torch.stack(rows))
        if count == 1:
            # Every rank has gathered the same counts, so every rank raises.
            raise ValueError(
                explain(
                    "more than 1 value per channel over all ranks when training",
                    f"{int(count)} (input of shape {tuple(x.shape)} here)",
                    "Use a larger batch, drop the last incomplete batch, or call eval() on this layer",
                )
            )
        inverse_std = (variance + eps).rsqrt()
        centred = x.to(mean.dtype) - _over_channels(mean, x.dim())
        scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
        output = centred.mul_(_over_channels(scale, x.dim()))
        if bias is not None:
            output.add_(_over_channels(bias.to(mean.dtype), x.dim()))
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = grad_output.to(mean.dtype)
        centred = x.to(mean.dtype) - _over_channels(mean, x.dim())
        sums = torch.stack([dy.sum(_reduced_dims(x)), (dy * centred).sum(_reduced_dims(x))])
        # The gradients of weight and bias stay local: whoever reduces gradients over ranks reduces these too.
        grad_weight = (sums[1] * inverse_std).to(weight.dtype) if needs_weight else None
        grad_bias = sums[0].to(weight.dtype if weight is not None else x.dtype) if needs_bias else None
        grad_input = None
        if needs_input:
            sums = sums.clone()  # grad_bias is a view of the local ones
            dist.all_reduce(sums, group=ctx.group)
            grad_input = batch_norm_input_gradient(dy, centred, inverse_std, weight, sums, count).to(x.dtype)
        return grad_input, grad_weight, grad_bias, None, None


# A compiled graph breaks here: a collective inside an autograd function is not traced.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _batch_norm_over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _BatchNormOverRanks.apply(x, weight, bias, eps, group)  # type: ignore[no-any-return,no-untyped-call]


# ----------------------------------------------------------------------------------------------------------- classes


class _SharesGroup(nn.Module):
    """Copies of a layer share its process group: a group is a handle, and cannot be copied."""

    original_class: ClassVar[type[nn.Module]]
    process_group: dist.ProcessGroup | None = None  # an attribute of the instance only where a group was asked for

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SharesGroup":
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        return clone


class _Synced(_SharesGroup):
    """The forward of a converted layer; its attributes are those of the layer it was."""

    num_dims: ClassVar[tuple[int, ...]]  # empty: any number from 2 on

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    track_running_stats: bool

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``input`` of shape ``(N, C, *)``; same shape, dtype and memory format.

        Raises:
            ValueError: a wrong number of dimensions, or only one value per channel on all ranks together.

        Collectives:
            In training mode, on all ranks of the group: one all-gather of ``2 * C + 1`` numbers, and one all-reduce of
            ``2 * C`` in the backward where the input needs a gradient. None in eval mode.
        """
        if input.dim() not in self.num_dims and (self.num_dims or input.dim() < 2):
            wanted = " or ".join(map(str, self.num_dims)) or "at least 2"
            raise ValueError(
                explain(f"an input of {wanted} dimensions", f"shape {tuple(input.shape)}", "Reshape the input")
            )
        over_ranks = (
            self.training
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size(self.process_group) > 1
        )
        if not over_ranks:
            return self._over_this_rank(input)
        output: Tensor
        output, mean, variance, count = _batch_norm_over_ranks(
            input, self.weight, self.bias, self.eps, self.process_group
        )
        factor = self._next_average_factor()
        if self.track_running_stats and count > 0:
            with torch.no_grad():
                if self.running_mean is not None:
                    _average(self.running_mean, mean, factor)
                if self.running_var is not None:
                    _average(self.running_var, variance * (count / (count - 1)), factor)
        return output

    def _over_this_rank(self, input: Tensor) -> Tensor:
        factor = self._next_average_factor()
        use_running = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if use_running else None,
            self.running_var if use_running else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )

    def _next_average_factor(self) -> float:
        """Counts a training batch; returns the weight of its statistics in the running ones."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the plain mean over all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        return momentum


def _average(running: Tensor, value: Tensor, factor: float) -> None:
    running.copy_(running.to(value.dtype) * (1 - factor) + value * factor)


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    """A :class:`torch.nn.BatchNorm1d` with the statistics of all ranks, in plain torch operations: any device."""

    original_class = nn.BatchNorm1d
    num_dims = (2, 3)


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    """A :class:`torch.nn.BatchNorm2d` with the statistics of all ranks, in plain torch operations: any device."""

    original_class = nn.BatchNorm2d
    num_dims = (4,)


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    """A :class:`torch.nn.BatchNorm3d` with the statistics of all ranks, in plain torch operations: any device."""

    original_class = nn.BatchNorm3d
    num_dims = (5,)


class SyncedBatchNorm(_Synced, nn.BatchNorm1d):
    """What a :class:`torch.nn.SyncBatchNorm` becomes on a device where torch's own raises, such as the CPU.

    It is no subclass of ``SyncBatchNorm``, because ``DistributedDataParallel`` refuses those on the CPU by their class.
    """

    original_class = nn.SyncBatchNorm
    num_dims = ()


class FusedBatchNorm1d(_SharesGroup, nn.BatchNorm1d, nn.SyncBatchNorm):
    """A :class:`torch.nn.BatchNorm1d` whose forward is that of :class:`torch.nn.SyncBatchNorm`: CUDA."""

    original_class = nn.BatchNorm1d


class FusedBatchNorm2d(_SharesGroup, nn.BatchNorm2d, nn.SyncBatchNorm):
    """A :class:`torch.nn.BatchNorm2d` whose forward is that of :class:`torch.nn.SyncBatchNorm`: CUDA."""

    original_class = nn.BatchNorm2d


class FusedBatchNorm3d(_SharesGroup, nn.BatchNorm3d, nn.SyncBatchNorm):
    """A :class:`torch.nn.BatchNorm3d` whose forward is that of :class:`torch.nn.SyncBatchNorm`: CUDA."""

    original_class = nn.BatchNorm3d


# -------------------------------------------------------------------------------------------------------- conversion

_PLAIN: dict[type[nn.Module], type[_SharesGroup]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
    nn.SyncBatchNorm: SyncedBatchNorm,
}
_FUSED: dict[type[nn.Module], type[_SharesGroup]] = {
    nn.BatchNorm1d: FusedBatchNorm1d,
    nn.BatchNorm2d: FusedBatchNorm2d,
    nn.BatchNorm3d: FusedBatchNorm3d,
}
_CONVERTED = (*_PLAIN.values(), *_FUSED.values())


@dataclass
class Conversion:
    """What :func:`convert_batchnorm` did to a model, and the way back.

    Attributes:
        converted: the layers that now use global statistics, by qualified name; a shared layer has its first name.
        already: names of layers that an earlier conversion, or the user with ``SyncBatchNorm``, had synchronised.
        skipped: why a BatchNorm layer was left alone, by qualified name.
    """

    converted: dict[str, nn.Module] = field(default_factory=dict)
    already: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    replaced: list[tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list, repr=False)

    def revert(self) -> None:
        """Gives every converted layer back as it was, with its updated statistics; doing it again changes nothing.

        Collectives:
            None.
        """
        for module in self.converted.values():
            if isinstance(module, _CONVERTED):
                original_class = module.original_class
                _set_class(module, original_class)
                if original_class is not nn.SyncBatchNorm:  # whose group was its own from the start
                    vars(module).pop("process_group", None)
        for parent, name, original, replacement in self.replaced:
            if getattr(parent, name) is replacement:
                parent.register_module(name, original)
        for original, replacement in {id(pair[2]): pair[2:] for pair in self.replaced}.values():
            _hand_back(original, replacement)
        self.replaced.clear()


def _set_class(module: nn.Module, new_class: type[nn.Module]) -> None:
    module.__class__ = new_class


def _hand_back(original: nn.Module, replacement: nn.Module) -> None:
    """Gives the original module what its replacement has become: device, dtype, values, training flags."""
    values = replacement.state_dict(keep_vars=True)
    for name, tensor in original.state_dict(keep_vars=True).items():
        tensor.data = values[name].data
        tensor.requires_grad_(values[name].requires_grad)
    flags = {name: module.training for name, module in replacement.named_modules()}
    for name, module in original.named_modules():
        module.training = flags.get(name, module.training)


def convert_batchnorm(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    factories: Mapping[type[nn.Module], BatchNormFactory] | None = None,
    fused: bool = False,
) -> Conversion:
    """Lets the BatchNorm layers of a model use the statistics of the batch over all ranks.

    Layers whose class is exactly ``BatchNorm1d``, ``BatchNorm2d`` or ``BatchNorm3d`` are converted in place, by their
    class. A subclass has code of its own, which a conversion would lose: it is skipped, unless ``factories`` says how
    its layers are synchronised. Nothing is changed where anything raises, and converting again changes nothing.

    Args:
        model: any module; a BatchNorm layer itself will do.
        process_group: the ranks that share statistics; all when ``None``. A ``SyncBatchNorm`` of the user's own keeps
            its own group.
        factories: for exact classes of layers, a function that returns a synchronised module with the same names and
            shapes in its ``state_dict``. Called once for each layer, before the model is wrapped.
        fused: use torch's CUDA kernels; the model must run on CUDA then. Without it the layers work on every device,
            and a ``SyncBatchNorm`` of the user's own does too, which torch only runs on accelerators.

    Returns:
        What was done, with :meth:`Conversion.revert`.

    Raises:
        TypeError: a factory returned something else than a module.
        ValueError: a layer is an uninitialised ``LazyBatchNorm``, was converted before for another group, or a factory
            changed the names or shapes in the ``state_dict``.

    Collectives:
        None.
    """
    factories = factories or {}
    table = _FUSED if fused else _PLAIN
    result = Conversion()
    exchanges: dict[str, tuple[nn.Module, type[_SharesGroup]]] = {}
    memo: dict[int, nn.Module | None] = {}  # modules seen, and what stands in their place from now on
    inside: tuple[str, ...] = ()  # whatever a factory handled is handled as a whole
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(inside):
            continue
        first_time = id(module) not in memo
        if type(module) in factories:
            if first_time:
                memo[id(module)] = _replacement(name, module, factories[type(module)])
                result.converted[name] = module
            replacement = memo[id(module)]
            assert replacement is not None
            parent, _, attribute = name.rpartition(".")
            result.replaced.append((model.get_submodule(parent), attribute, module, replacement))
            inside = (*inside, f"{name}.")
        elif first_time:
            memo[id(module)] = None
            if _is_synchronised(name, module, process_group, fused):
                result.already.append(name)
            elif (reason := _reason_to_skip(name, module, table)) is not None:
                result.skipped[name] = reason
            elif type(module) in table:
                exchanges[name] = (module, table[type(module)])
    for name, (module, new_class) in exchanges.items():
        if type(module) is not nn.SyncBatchNorm and (fused or process_group is not None):
            vars(module)["process_group"] = process_group
        _set_class(module, new_class)
        result.converted[name] = module
    for parent_module, attribute, _, replacement in result.replaced:
        parent_module.register_module(attribute, replacement)
    return result


def _replacement(name: str, module: nn.Module, factory: BatchNormFactory) -> nn.Module:
    if not name:
        raise ValueError(
            explain(
                "a factory for a layer inside a model",
                f"a model that is a {type(module).__qualname__} itself",
                "Put it into a module of your own, because a model cannot be replaced inside itself",
            )
        )
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    replacement = factory(module)
    if not isinstance(replacement, nn.Module):
        raise TypeError(
            explain(
                f"the factory for {type(module).__qualname__} to return a module",
                f"{type(replacement).__qualname__} for layer {name!r}",
                "Return the synchronised layer",
            )
        )
    new_shapes = {key: value.shape for key, value in replacement.state_dict().items()}
    if shapes != new_shapes:
        raise ValueError(
            explain(
                f"the factory for {type(module).__qualname__} to keep the names and shapes of the state_dict: {shapes}",
                f"{new_shapes} for layer {name!r}",
                "Return a layer whose checkpoints load into the original one",
            )
        )
    return replacement


def _is_synchronised(name: str, module: nn.Module, group: dist.ProcessGroup | None, fused: bool) -> bool:
    if not isinstance(module, _CONVERTED):
        return fused and isinstance(module, nn.SyncBatchNorm)
    if group is not None and module.original_class is not nn.SyncBatchNorm and module.process_group is not group:
        raise ValueError(
            explain(
                f"layer {name!r} unconverted, or converted for the same process group",
                "one that was converted for another group",
                "Revert the first conversion before the second",
            )
        )
    return True


def _reason_to_skip(name: str, module: nn.Module, table: Mapping[type[nn.Module], type[_SharesGroup]]) -> str | None:
    if isinstance(module, (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)):
        raise ValueError(
            explain(
                "every BatchNorm layer to know its number of features before it is converted",
                f"layer {name!r}, a {type(module).__qualname__} that has not seen an input",
                "Run one batch through the model in its constructor or setup(), or give num_features",
            )
        )
    if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
        return None
    if type(module) not in table:
        return f"{type(module).__qualname__} is a class of its own; give a factory for it"
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    return None
