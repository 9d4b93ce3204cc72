"""``ddp-plugin plan``: memory, bytes, the length of a step and how it scales, before anything is started."""

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_plugin.collectives.cost import Link
from ddp_plugin.errors import explain
from ddp_plugin.hooks import HOOKS
from ddp_plugin.learning_rate import EffectiveBatch, scale_ratio
from ddp_plugin.planning.cluster import Cluster
from ddp_plugin.planning.links import LINKS, find_link
from ddp_plugin.planning.memory import OPTIMIZERS, PRECISIONS, activation_bytes, memory_bytes
from ddp_plugin.planning.predicting import Prediction, Shapes
from ddp_plugin.planning.run_plan import RunPlan, make_plan, render_plan
from ddp_plugin.planning.traced import Trace, assume_trace, trace_step

__all__ = ["HELP", "add_arguments", "run"]

HELP = "what a run will need: memory, bytes on the wire, seconds of a step, scaling"
_WIDTH = 4096  # of the square matrices that stand for a model of which only the number of parameters is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    model = parser.add_argument_group("the model, one of these").add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", type=float, metavar="N", help="its number of parameters, such as 7e9")
    model.add_argument(
        "--model",
        metavar="PACKAGE.MODULE:NAME",
        help="a class or function without arguments that returns the model; one with an example_input_array (as of a "
        "LightningModule) or an example_loss() is run here, and its backward traced",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--gpus", type=int, default=8, metavar="N", help="processes of a node (default 8)")
    where.add_argument("--nodes", type=int, default=1, metavar="N", help="default 1")
    where.add_argument(
        "--inside", default="a100_nvswitch", metavar="LINK", help="inside a node (default a100_nvswitch)"
    )
    where.add_argument(
        "--between", default="a100_4xhdr200", metavar="LINK", help="between nodes (default a100_4xhdr200)"
    )
    where.add_argument("--memory-gb", type=float, metavar="GB", help="of one GPU, such as 80")
    how = parser.add_argument_group("how it trains")
    how.add_argument("--precision", choices=list(PRECISIONS), default="bf16-mixed", help="default bf16-mixed")
    how.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="default adamw")
    how.add_argument("--gradient-as-bucket-view", action="store_true", help="saves one copy of the gradients")
    how.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="default: the best one")
    how.add_argument("--batch-size", type=int, metavar="N", help="samples of a process and micro-batch")
    how.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches of an optimizer step")
    how.add_argument("--base-batch", type=int, metavar="N", help="effective batch that the learning rate was found for")
    how.add_argument(
        "--step-s", type=float, metavar="S", help="seconds of forward and backward of one process, as measured"
    )
    how.add_argument("--hooks", nargs="+", metavar="NAME", choices=list(HOOKS), help="default: all")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it too: .png, .svg or .pdf")
    parser.epilog = "Links: " + ", ".join(LINKS) + ", or a file from `ddp-plugin doctor --save-link`."


def run(chosen: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ValueError: what cannot be planned, in words.
    """
    plan = plan_for(chosen)
    if chosen.picture is not None:
        if not plan.is_timed:
            raise ValueError(
                explain(
                    "the length of a step, for a picture of it", "none", "Give --step-s, or --model with an example"
                )
            )
        from ddp_plugin.planning.picture import draw_plan

        draw_plan(chosen.picture, plan)
    print(json.dumps(_as_json(plan), indent=2) if chosen.json else render_plan(plan), end="\n" if chosen.json else "")
    return 0


def plan_for(chosen: argparse.Namespace) -> RunPlan:
    """Returns the plan that the arguments ask for.

    Raises:
        ValueError: what cannot be planned, in words.
    """
    for name in ("step_s", "memory_gb", "parameters"):
        value = getattr(chosen, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(explain(f"--{name.replace('_', '-')} above 0", repr(value), "Correct it"))
    cluster = Cluster(chosen.nodes, chosen.gpus, find_link(chosen.inside), find_link(chosen.between))
    name, shapes, trace, activations = _model(chosen)
    memory = memory_bytes(
        sum(gradient.num_elements for gradient in trace.gradients),
        chosen.precision,
        chosen.optimizer,
        distributed=cluster.world_size > 1,
        gradient_as_bucket_view=chosen.gradient_as_bucket_view,
        activations=activations,
    )
    batch = None
    if chosen.batch_size is not None:
        batch = EffectiveBatch(chosen.batch_size, cluster.world_size, chosen.accumulate)
    if chosen.base_batch is not None and batch is None:
        raise ValueError(explain("--batch-size beside --base-batch", "none", "Give the samples of a process"))
    ratios = {}
    if batch is not None and chosen.base_batch is not None:
        ratios = {rule: scale_ratio(rule, batch.total / chosen.base_batch) for rule in ("linear", "sqrt")}
    return make_plan(
        name,
        shapes,
        trace,
        cluster,
        memory,
        device_bytes=None if chosen.memory_gb is None else chosen.memory_gb * 1e9,
        batch=batch,
        rate_ratios=ratios,
        bucket_cap_mb=chosen.bucket_cap_mb,
        hooks=chosen.hooks,
    )


def _model(chosen: argparse.Namespace) -> tuple[str, Shapes, Trace, int]:
    """Returns the model's name, its shapes, a step of it, and the bytes of its activations: 0 where it is not run."""
    element_size = PRECISIONS[chosen.precision][0].itemsize
    # Of a step, the backward computes two gradients where the forward computes one output.
    forward_s, backward_s = (chosen.step_s or 0.0) / 3, (chosen.step_s or 0.0) * 2 / 3
    if chosen.parameters is not None:
        shapes = _assumed_shapes(int(chosen.parameters))
        return (
            f"a model of {chosen.parameters:g} parameters",
            shapes,
            assume_trace(
                {name: math.prod(shape) for name, shape in shapes.items()}, element_size, forward_s, backward_s
            ),
            0,
        )
    module = _built(chosen.model)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    example = _example_loss(module)
    if chosen.step_s is None and example is not None:
        return chosen.model, shapes, trace_step(module, example), activation_bytes(module, example)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    activations = activation_bytes(module, example) if example is not None else 0
    return chosen.model, shapes, assume_trace(sizes, element_size, forward_s, backward_s), activations


def _assumed_shapes(num_parameters: int) -> dict[str, tuple[int, ...]]:
    """Returns shapes of square matrices that add up to a number of parameters, the last one smaller."""
    if num_parameters < _WIDTH**2:
        return {"the only matrix": (1, num_parameters)}
    whole, left = divmod(num_parameters, _WIDTH**2)
    shapes: dict[str, tuple[int, ...]] = {f"matrix {number}": (_WIDTH, _WIDTH) for number in range(whole)}
    return shapes | ({"the rest": (1, left)} if left else {})


def _built(path: str) -> nn.Module:
    """Imports a class or function, and calls it."""
    module_name, _, name = path.partition(":")
    if not name:
        raise ValueError(explain("--model PACKAGE.MODULE:NAME", repr(path), "Put a colon before the class or function"))
    sys.path.insert(0, os.getcwd())  # as `python -m` does: what a person has in front of them can be imported
    try:
        built = getattr(importlib.import_module(module_name), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            explain(
                f"{name!r} in the module {module_name!r}, called without arguments",
                f"{type(error).__name__}: {error}",
                "Name a class or a function that returns the model",
            )
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(built, nn.Module):
        raise ValueError(explain("a torch module", type(built).__name__, "Return the model from the function"))
    return built


def _example_loss(module: nn.Module) -> Any:
    """Returns what computes a loss of the model, or ``None`` where it brings no example."""
    if callable(own := getattr(module, "example_loss", None)):
        return own
    if (example := getattr(module, "example_input_array", None)) is None:
        return None
    if isinstance(example, Mapping):
        return lambda: _sum(module(**example))
    return lambda: _sum(module(*example) if isinstance(example, tuple) else module(example))


def _sum(output: Any) -> Tensor:
    """Returns a number that depends on every tensor of an output."""
    if isinstance(output, Tensor):
        return output.float().sum()
    parts = output.values() if isinstance(output, Mapping) else output
    return torch.stack([_sum(part) for part in parts]).sum()


def _as_json(plan: RunPlan) -> dict[str, Any]:
    def link(one: Link) -> dict[str, Any]:
        return dataclasses.asdict(one)

    return {
        "model": plan.model,
        "num_parameters": plan.num_parameters,
        "world_size": plan.cluster.world_size,
        "num_nodes": plan.cluster.num_nodes,
        "inside": link(plan.cluster.inside),
        "between": link(plan.cluster.between),
        "memory_bytes": dict(plan.memory),
        "state_bytes": plan.state_bytes,
        "effective_batch": None if plan.batch is None else plan.batch.total,
        "learning_rate_ratios": dict(plan.rate_ratios),
        "forward_s": plan.trace.forward_s if plan.is_timed else None,
        "backward_s": plan.trace.backward_s if plan.is_timed else None,
        "bucket_cap_mb": plan.bucket_cap_mb,
        "algorithms": [_prediction(one, plan.is_timed) for one in plan.algorithms],
        "hooks": [_prediction(one, plan.is_timed) for one in plan.hooks],
        "efficiency_ratios": dict(plan.efficiency_ratios) if plan.is_timed else None,
    }


def _prediction(one: Prediction, is_timed: bool) -> dict[str, Any]:
    return {
        "name": one.name,
        "sent_bytes": one.sent_bytes,
        "communication_s": one.overlap.communication_s,
        "exposed_s": one.overlap.exposed_s if is_timed else None,
        "step_s": one.step_s if is_timed else None,
    }
