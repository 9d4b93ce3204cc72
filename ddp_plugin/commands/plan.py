"""``ddp-plugin plan``: memory, bytes, the length of a step and how it scales, before anything is started."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_plugin.collectives.cost import COSTS, Link
from ddp_plugin.errors import check_count, explain
from ddp_plugin.hooks import HOOKS
from ddp_plugin.learning_rate import EffectiveBatch, scale_ratio
from ddp_plugin.planning.checking import Checked, check, read_measured, render_checked, summary
from ddp_plugin.planning.cluster import Cluster
from ddp_plugin.planning.described import DescribedRun, describe_script
from ddp_plugin.planning.links import LINKS, find_link
from ddp_plugin.planning.memory import OPTIMIZERS, PRECISIONS, activation_bytes, memory_bytes
from ddp_plugin.planning.predicting import Prediction, Shapes
from ddp_plugin.planning.run_plan import RunPlan, make_plan, render_plan
from ddp_plugin.planning.traced import Trace, assume_trace, repeated, trace_step
from ddp_plugin.scripts import build_by_name
from ddp_plugin.timeline.picture import picture_formats

__all__ = ["HELP", "add_arguments", "run"]

HELP = "what a run will need: memory, bytes on the wire, seconds of a step, scaling"
_MOST_PROCESSES, _MOST_PARAMETERS = 1_000_000, 1e13
_WIDTH = 4096  # of the square matrices that stand for a model of which only the number of parameters is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    model = parser.add_argument_group("the model, one of these").add_mutually_exclusive_group()
    model.add_argument("--parameters", type=float, metavar="N", help="its number of parameters, such as 7e9")
    model.add_argument(
        "--model",
        metavar="PACKAGE.MODULE:NAME",
        help="a class or function without arguments that returns the model; one with an example_input_array (as of a "
        "LightningModule) or an example_loss() is run here, and its backward traced",
    )
    model.add_argument(
        "--recipe",
        nargs="+",
        metavar=("SCRIPT.py", "KEY=VALUE"),
        help="a training script with a function describe_run, and its own arguments, such as recipes/llm.py "
        "config=a100_8x; they say where and how it trains; where its device is here, its backward is traced",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--gpus", type=int, metavar="N", help="processes of a node (default 8)")
    where.add_argument("--nodes", type=int, metavar="N", help="default 1")
    where.add_argument(
        "--inside", default="a100_nvswitch", metavar="LINK", help="inside a node (default a100_nvswitch)"
    )
    where.add_argument(
        "--between", default="a100_4xhdr200", metavar="LINK", help="between nodes (default a100_4xhdr200)"
    )
    where.add_argument("--memory-gb", type=float, metavar="GB", help="of one GPU, such as 80")
    how = parser.add_argument_group("how it trains")
    how.add_argument("--precision", choices=list(PRECISIONS), help="default bf16-mixed")
    how.add_argument("--optimizer", choices=list(OPTIMIZERS), help="default adamw")
    how.add_argument(
        "--gradient-as-bucket-view", action="store_true", default=None, help="saves one copy of the gradients"
    )
    how.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="default: the best one")
    how.add_argument("--batch-size", type=int, metavar="N", help="samples of a process and micro-batch")
    how.add_argument("--accumulate", type=int, metavar="N", help="micro-batches of an optimizer step (default 1)")
    how.add_argument("--base-batch", type=int, metavar="N", help="effective batch that the learning rate was found for")
    how.add_argument(
        "--step-s", type=float, metavar="S", help="seconds of a micro-batch's forward and backward, as measured"
    )
    how.add_argument("--hooks", nargs="+", metavar="NAME", choices=list(HOOKS), help="default: all")
    parser.add_argument(
        "--check", action="store_true", help="show how far off such plans are, beside a run that was measured"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it too, or anew: .png, .svg or .pdf")
    parser.epilog = "Links: " + ", ".join(LINKS) + ", or a file from `ddp-plugin doctor --save-link`."


def run(chosen: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ValueError: what cannot be planned, in words.
    """
    if chosen.check:
        if (given := _given(chosen, ("parameters", "model", "recipe"))) is not None:
            raise ValueError(explain("--check alone", f"{given} as well", "Leave one of them out"))
        measured = read_measured()
        checked = check(measured)
        print(_checked_as_json(checked, measured) if chosen.json else render_checked(checked, measured["made_with"]))
        return 0
    if chosen.picture is not None and chosen.picture.suffix.lstrip(".").lower() not in picture_formats():
        raise ValueError(explain("--picture to end in .png, .svg or .pdf", str(chosen.picture), "Name it so"))
    plan = plan_for(chosen)
    if chosen.picture is not None and not plan.is_timed:
        raise ValueError(
            explain("the length of a step, for a picture of it", "none", "Give --step-s, or --model with an example")
        )
    if chosen.picture is not None:
        from ddp_plugin.planning.picture import draw_plan

        draw_plan(chosen.picture, plan)
        print(f"ddp-plugin plan: the picture: {chosen.picture}", file=sys.stderr)
    if chosen.json:
        print(json.dumps(_as_json(plan), indent=2))
    else:
        measured = read_measured()
        print(f"{render_plan(plan)}\n{summary(check(measured), measured['made_with'])}")
    return 0


def plan_for(chosen: argparse.Namespace) -> RunPlan:
    """Returns the plan that the arguments ask for.

    Raises:
        ValueError: what cannot be planned, in words.
    """
    for name in ("step_s", "memory_gb", "parameters", "bucket_cap_mb"):
        value = getattr(chosen, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(explain(f"--{name.replace('_', '-')} above 0", repr(value), "Correct it"))
    run = _described(chosen)
    cluster = Cluster(run.num_nodes, run.ranks_per_node, find_link(chosen.inside), find_link(chosen.between))
    name, shapes, trace, activations = _model(chosen, run)
    memory = memory_bytes(
        sum(gradient.num_elements for gradient in trace.gradients),
        run.precision,
        run.optimizer,
        distributed=cluster.world_size > 1,
        gradient_as_bucket_view=run.gradient_as_bucket_view,
        activations=activations,
    )
    if chosen.base_batch is not None and run.batch is None:
        raise ValueError(explain("--batch-size beside --base-batch", "none", "Give the samples of a process"))
    ratios = {}
    if run.batch is not None and chosen.base_batch is not None:
        ratios = {rule: scale_ratio(rule, run.batch.total / chosen.base_batch) for rule in ("linear", "sqrt")}
    return make_plan(
        name,
        shapes,
        repeated(trace, run.num_accumulated),
        cluster,
        memory,
        device_bytes=None if chosen.memory_gb is None else chosen.memory_gb * 1e9,
        batch=run.batch,
        rate_ratios=ratios,
        bucket_cap_mb=run.bucket_cap_mb,
        hooks=run.hooks,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """Where and how it trains: as the command line says, or the recipe."""

    ranks_per_node: int
    num_nodes: int
    precision: str
    optimizer: str
    gradient_as_bucket_view: bool
    bucket_cap_mb: float | None
    num_accumulated: int
    batch: EffectiveBatch | None
    hooks: list[Any] | None
    recipe: DescribedRun | None = None


def _described(chosen: argparse.Namespace) -> _Run:
    if chosen.recipe is not None:
        return _recipe(chosen)
    if chosen.parameters is None and chosen.model is None:
        raise ValueError(explain("--parameters, --model or --recipe", "none of them", "Say what is planned"))
    gpus, nodes, accumulated = (
        default if given is None else given
        for given, default in ((chosen.gpus, 8), (chosen.nodes, 1), (chosen.accumulate, 1))
    )
    counts = [("--gpus", gpus), ("--nodes", nodes), ("--accumulate", accumulated)]
    for name, count in [*counts, ("--batch-size", 1 if chosen.batch_size is None else chosen.batch_size)]:
        check_count(name, count, 1)
    if gpus * nodes > _MOST_PROCESSES or (chosen.parameters or 0) > _MOST_PARAMETERS:
        raise ValueError(
            explain(
                f"at most {_MOST_PROCESSES:,} processes and {_MOST_PARAMETERS:.0e} parameters",
                f"{gpus * nodes:,} and {chosen.parameters or 0:g}",
                "Lower them",
            )
        )
    batch = None
    if chosen.batch_size is not None:
        batch = EffectiveBatch(chosen.batch_size, gpus * nodes, accumulated)
    return _Run(
        gpus,
        nodes,
        chosen.precision or "bf16-mixed",
        chosen.optimizer or "adamw",
        bool(chosen.gradient_as_bucket_view),
        chosen.bucket_cap_mb,
        accumulated,
        batch,
        chosen.hooks,
    )


def _given(chosen: argparse.Namespace, names: Sequence[str]) -> str | None:
    """Returns the first of some options that was given."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(chosen, name) is not None), None)


def _recipe(chosen: argparse.Namespace) -> _Run:
    own_settings = ("gpus", "nodes", "precision", "optimizer", "gradient_as_bucket_view", "batch_size", "accumulate")
    if (given := _given(chosen, own_settings)) is not None:
        raise ValueError(
            explain(
                "--recipe alone to say how it trains",
                f"{given} as well",
                "Give the recipe's own setting, as on its command line",
            )
        )
    script, *arguments = chosen.recipe
    recipe = describe_script(Path(script), arguments)
    hooks = chosen.hooks
    if hooks is None and recipe.comm_hook is not None:
        own = recipe.comm_hook if isinstance(recipe.comm_hook, str) else recipe.comm_hook["name"]
        hooks = [recipe.comm_hook, *(name for name in HOOKS if name not in COSTS and name != own)]
    return _Run(
        recipe.ranks_per_node,
        recipe.num_nodes,
        recipe.precision,
        recipe.optimizer,
        recipe.gradient_as_bucket_view,
        recipe.bucket_cap_mb if chosen.bucket_cap_mb is None else chosen.bucket_cap_mb,
        recipe.batch.num_accumulated,
        recipe.batch,
        hooks,
        recipe,
    )


def _model(chosen: argparse.Namespace, run: _Run) -> tuple[str, Shapes, Trace, int]:
    """Returns the model's name, its shapes, a micro-batch of it, and the bytes of its activations: 0 if unknown."""
    element_size = PRECISIONS[run.precision][0].itemsize
    # Of a step, the backward computes two gradients where the forward computes one output.
    forward_s, backward_s = (chosen.step_s or 0.0) / 3, (chosen.step_s or 0.0) * 2 / 3

    def assumed(shapes: Shapes) -> Trace:
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        return assume_trace(sizes, element_size, forward_s, backward_s)

    if run.recipe is not None:
        shapes: Shapes = run.recipe.shapes()
        trace = run.recipe.trace() if chosen.step_s is None else None
        return run.recipe.name, shapes, trace or assumed(shapes), run.recipe.activations_bytes
    if chosen.parameters is not None:
        shapes = _assumed_shapes(int(chosen.parameters))
        return f"a model of {chosen.parameters:g} parameters", shapes, assumed(shapes), 0
    module = build_by_name("--model", chosen.model, nn.Module)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    example = _example_loss(module)
    activations = activation_bytes(module, example) if example is not None else 0
    if chosen.step_s is None and example is not None:
        return chosen.model, shapes, trace_step(module, example), activations
    return chosen.model, shapes, assumed(shapes), activations


def _assumed_shapes(num_parameters: int) -> dict[str, tuple[int, ...]]:
    """Returns shapes of square matrices that add up to a number of parameters, the last one smaller."""
    if num_parameters < _WIDTH**2:
        return {"the only matrix": (1, num_parameters)}
    whole, left = divmod(num_parameters, _WIDTH**2)
    shapes: dict[str, tuple[int, ...]] = {f"matrix {number}": (_WIDTH, _WIDTH) for number in range(whole)}
    return shapes | ({"the rest": (1, left)} if left else {})


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


def _checked_as_json(checked: Sequence[Checked], measured: Mapping[str, Any]) -> str:
    steps = [dataclasses.asdict(one) | {"error_ratio": one.error_ratio} for one in checked]
    return json.dumps({"made_with": measured["made_with"], "steps": steps}, indent=2)


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
        "late_gradient": None if plan.late is None else {"name": plan.late[0].name, "exposed_s": plan.late[1]},
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
