"""The conversion there and back, which loses nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from ddp_plugin.batchnorm.layers import (
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedBatchNorm3d,
    SharesGroup,
    SyncedBatchNorm,
    SyncedBatchNorm1d,
    SyncedBatchNorm2d,
    SyncedBatchNorm3d,
)
from ddp_plugin.errors import explain

__all__ = ["BatchNormFactory", "Conversion", "convert_batchnorm"]

BatchNormFactory = Callable[[nn.Module], nn.Module]
"""``module -> synchronised module``, for a layer class of the user's own."""

_PLAIN: dict[type[nn.Module], type[SharesGroup]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
    nn.SyncBatchNorm: SyncedBatchNorm,
}
_FUSED: dict[type[nn.Module], type[SharesGroup]] = {
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
    exchanges: dict[str, tuple[nn.Module, type[SharesGroup]]] = {}
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


def _reason_to_skip(name: str, module: nn.Module, table: Mapping[type[nn.Module], type[SharesGroup]]) -> str | None:
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
