"""The layout tells the truth: reading order is import order, and private names stay in one place."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

import ddp_plugin
from tests.harness import ROOT

PACKAGE = ROOT / "ddp_plugin"

# A module imports only modules above it. docs/tour.md tells the story in the same order.
STORY = (
    "errors",
    "forwarding",
    "evaluation",
    "_compat",
    "config",
    "process_group",
    "gather",
    "matching",
    "agreement",
    "averaging",
    "collectives.lane",
    "collectives.schedules",
    "collectives.simulation",
    "collectives.walkthrough",
    "collectives.cost",
    "collectives.traffic",
    "collectives.pairwise",
    "collectives.execution",
    "collectives.drawing",
    "collectives.measuring",
    "collectives",
    "hooks._contents",
    "hooks._exchange",
    "hooks._feedback",
    "hooks._record",
    "hooks._resolve",
    "hooks.exact",
    "hooks.cast",
    "hooks.noop",
    "hooks.algorithms",
    "hooks._blocks",
    "hooks.quantised",
    "hooks._low_rank",
    "hooks.powersgd",
    "hooks.topk",
    "hooks.hierarchical",
    "hooks._attached",
    "hooks.periodic",
    "hooks",
    "wrapping",
    "wrapping.arguments",
    "wrapping.rewrap",
    "wrapping.unused",
    "wrapping.buckets",
    "wrapping.lost_overlap",
    "logical_shards",
    "tree_exchange",
    "streams",
    "data",
    "data.sampling",
    "data.sharding",
    "data.loaders",
    "data.lockstep",
    "data.epochs",
    "data.orders",
    "data.sharded_sampler",
    "data.training_loader",
    "seeding",
    "ghost",
    "predictions",
    "batchnorm.kernels",
    "batchnorm.layers",
    "batchnorm.convert",
    "batchnorm",
    "fingerprint",
    "replica_state",
    "learning_rate",
    "weighting",
    "noise_scale",
    "checkpoints.manifest",
    "checkpoints.files",
    "checkpoints.reading",
    "checkpoints.finding",
    "checkpoints.mismatch",
    "checkpoints",
    "timeline",
    "timeline.steps",
    "timeline.straggling",
    "timeline.chrome_trace",
    "timeline.picture",
    "timeline.recorder",
    "tracing",
    "tracing.request",
    "tracing.issuers",
    "tracing.records",
    "tracing.joining",
    "tracing.findings",
    "tracing.drawing",
    "tracing.page",
    "tracing.keeping",
    "tracing.watching",
    "scripts",
    "planning",
    "planning.links",
    "planning.cluster",
    "planning.memory",
    "planning.overlap",
    "planning.traced",
    "planning.described",
    "planning.predicting",
    "planning.checking",
    "planning.run_plan",
    "planning.picture",
    "supervision",
    "supervision.activity",
    "supervision.board",
    "supervision.pulse",
    "supervision.processes",
    "supervision.ending",
    "supervision.failure",
    "supervision.failure_watch",
    "supervision.flight",
    "supervision.stacks",
    "supervision.diagnosis",
    "supervision.hang",
    "stopping",
    "stopping.signals",
    "stopping.shield",
    "stopping.slurm",
    "preflight",
    "preflight.addresses",
    "preflight.facts",
    "preflight.comparison",
    "preflight.environment",
    "preflight.roll_call",
    "doctor",
    "doctor.findings",
    "doctor.machine",
    "doctor.loaders",
    "doctor.environment",
    "doctor.self_test",
    "doctor.examination",
    "callbacks._shell",
    "callbacks._sharing",
    "callbacks._recording",
    "callbacks.global_mean_loss",
    "callbacks.sampler_epoch",
    "callbacks.per_rank_seed",
    "callbacks.exact_evaluation",
    "callbacks.decision_sync",
    "callbacks.auto_resume",
    "callbacks.replica_consistency",
    "callbacks.gather_predictions",
    "callbacks.convert_sync_batchnorm",
    "callbacks.scale_learning_rate",
    "callbacks.gradient_noise_scale",
    "callbacks.straggler_monitor",
    "callbacks.communication_monitor",
    "callbacks.hang_watchdog",
    "callbacks._tracing",
    "callbacks",
    "strategy.group",
    "strategy.preflight",
    "strategy.reductions",
    "strategy.wrapping",
    "strategy.averaging",
    "strategy.logical",
    "strategy.checkpoint_io",
    "strategy.checkpoints",
    "strategy.stopping",
    "strategy.supervised",
    "strategy.traced",
    "strategy.custom",
    "strategy",
    "tuning.layouts",
    "tuning.choice",
    "tuning.trials",
    "tuning.interrupting",
    "tuning.tuner",
    "tuning",
    "tuning.sources",
    "commands",
    "commands.ring",
    "commands.plan",
    "commands.doctor",
    "commands.trace",
    "commands.tune",
    "cli",
    "__main__",
)
# Kernels: neither processes nor Lightning.
PURE = (
    "collectives.schedules",
    "collectives.simulation",
    "collectives.walkthrough",
    "collectives.cost",
    "collectives.drawing",
    "planning.links",
    "planning.cluster",
    "planning.memory",
    "planning.overlap",
    "planning.traced",
    "planning.described",
    "planning.predicting",
    "planning.checking",
    "planning.run_plan",
    "planning.picture",
    "data.sampling",
    "data.sharding",
    "evaluation",
    "fingerprint",
    "learning_rate",
    "weighting",
    "noise_scale",
    "checkpoints.manifest",
    "checkpoints.mismatch",
    "tuning.layouts",
    "tuning.choice",
    "timeline.steps",
    "timeline.straggling",
    "timeline.chrome_trace",
    "timeline.picture",
    "tracing.request",
    "tracing.issuers",
    "tracing.records",
    "tracing.joining",
    "tracing.findings",
    "tracing.drawing",
    "tracing.page",
    "logical_shards",
    "supervision.flight",
    "supervision.diagnosis",
    "batchnorm.kernels",
    "hooks._low_rank",
    "preflight.facts",
    "preflight.comparison",
    "preflight.environment",
)
PUBLIC = {
    "AutoResume",
    "CommunicationMonitor",
    "ConvertSyncBatchNorm",
    "CustomDDPStrategy",
    "DecisionSync",
    "ExactEvaluation",
    "GatherPredictions",
    "GlobalMeanLoss",
    "GradientNoiseScale",
    "HangWatchdog",
    "NcclOptions",
    "PerRankSeed",
    "ReplicaConsistency",
    "SamplerEpoch",
    "ScaleLearningRate",
    "StragglerMonitor",
    "StrategyConfig",
    "Tuning",
    "__version__",
    "default_callbacks",
    "log_weight",
    "normalize_gradients",
    "read_predictions",
    "tune",
}


def path_of(module: str) -> Path:
    base = PACKAGE.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "ddp_plugin":
                found |= {f"ddp_plugin.{alias.name}" for alias in node.names}
    return found


@functools.lru_cache
def own_class_names() -> set[str]:
    trees = [ast.parse(path_of(module).read_text()) for module in STORY]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def private_names(source: str) -> list[str]:
    """Private attributes of other objects, and imports of private names, outside the package's own."""
    found, own_classes = [], own_class_names()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = node.value
            is_documented = ast.unparse(node) == "os._exit"
            if not is_documented and ast.unparse(owner) not in ("self", "cls", "super()", "type(self)", *own_classes):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("ddp_plugin"):
            parts = node.module.split(".") + [alias.name for alias in node.names]
            found += [f"{node.module}: {part}" for part in parts if part.startswith("_") and part != "__future__"]
    return found


def test_the_story_names_every_module() -> None:
    on_disk = {module_of(path) for path in PACKAGE.rglob("*.py")} - {""}
    assert on_disk == set(STORY)


@pytest.mark.parametrize("module", STORY)
def test_a_module_imports_only_modules_above_it(module: str) -> None:
    above = {f"ddp_plugin.{name}" for name in STORY[: STORY.index(module)]}
    above |= {"ddp_plugin", "ddp_plugin.__version__"}
    ours = {name for name in imports_of(path_of(module)) if name.split(".")[0] == "ddp_plugin"}
    assert ours <= above, f"{module} imports {sorted(ours - above)}"


@pytest.mark.parametrize("module", [name for name in STORY[: STORY.index("callbacks._shell")] if name != "_compat"])
def test_what_comes_before_the_callbacks_serves_a_plain_torch_loop(module: str) -> None:
    assert not {
        name for name in imports_of(path_of(module)) if name.split(".")[0] in ("lightning", "pytorch_lightning")
    }


@pytest.mark.parametrize("module", PURE)
def test_a_kernel_knows_no_processes(module: str) -> None:
    assert not {name for name in imports_of(path_of(module)) if name.startswith("torch.distributed")}


@pytest.mark.parametrize("module", [name for name in STORY if name != "_compat"])
def test_private_names_of_others_are_in_compat_only(module: str) -> None:
    assert private_names(path_of(module).read_text()) == []


def test_that_search_finds_private_names() -> None:
    assert private_names("trainer._results.reset()") == ["trainer._results"]
    assert private_names("from lightning.fabric.utilities.data import _update_dataloader")
    assert private_names("self._own = super()._inherited()") == []


def test_the_public_names_are_these_and_documented() -> None:
    assert set(ddp_plugin.__all__) == PUBLIC
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(ddp_plugin, name)), name


def _says_what_it_communicates(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function has the section if it communicates; for a class, it or each of its methods that do."""
    communicates = re.search(r"dist\.(all_|broadcast|gather|barrier|new_group|reduce)", ast.unparse(node))
    if not communicates or "Collectives:" in (ast.get_docstring(node) or ""):
        return True
    if isinstance(node, ast.FunctionDef):
        return False
    return all(_says_what_it_communicates(method) for method in node.body if isinstance(method, ast.FunctionDef))


def test_every_public_name_that_communicates_says_so() -> None:
    """Public functions and classes of the modules that use torch.distributed have a Collectives section."""
    silent, num_checked = [], 0
    for module in STORY:
        tree = ast.parse(path_of(module).read_text())
        uses = {"torch.distributed", "ddp_plugin.gather", "ddp_plugin.process_group"} & imports_of(path_of(module))
        if module in ("_compat", "errors") or not uses:
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                num_checked += 1
                if not _says_what_it_communicates(node):
                    silent.append(f"{module}.{node.name}")
    assert num_checked > 10
    assert silent == []
