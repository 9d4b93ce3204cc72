"""ConvertSyncBatchNorm: a fit on several ranks is the fit of one process, and the model comes back as it was."""

import inspect
import os

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy
from ddp_plugin.batchnorm import SyncedBatchNorm, SyncedBatchNorm1d
from ddp_plugin.callbacks import convert_sync_batchnorm
from ddp_plugin.errors import DDPPluginError
from tests.harness import RankFailureError, ranks, run_ranks, trainer

NUM_STEPS, PER_RANK = 4, 3
DDP_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters


class ScaledBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


class SyncedScaledBatchNorm(SyncedBatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def synced_scaled(original):
    replacement = SyncedScaledBatchNorm(original.num_features, dtype=original.weight.dtype)
    replacement.load_state_dict(original.state_dict())
    return replacement


def network(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), norm(5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    ).double()


class Model(pl.LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = net if net is not None else network()
        self.classes = set()

    def training_step(self, batch, batch_idx):
        self.classes.update(type(module) for module in self.net)
        x, y = batch
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def samples(world_size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_STEPS * PER_RANK * world_size, 3, generator=generator, dtype=torch.float64)
    return x * 2 + 1, x.prod(1, keepdim=True)


def loader(world_size):
    """Deals the samples round; without this sampler Lightning would shuffle them."""
    dataset = TensorDataset(*samples(world_size))
    sampler = DistributedSampler(dataset, world_size, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(dataset, batch_size=PER_RANK, sampler=sampler)


def train_in_one_process(net, world_size):
    """Plain torch on the global batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = samples(world_size)
    for step in range(NUM_STEPS):
        rows = slice(step * PER_RANK * world_size, (step + 1) * PER_RANK * world_size)
        optimizer.zero_grad()
        (net(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return net


def assert_equal_weights(net, wanted):
    assert net.state_dict().keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-10, atol=1e-10)


def fit(model, world_size, callback=None, **settings):
    defaults = {"callbacks": [callback or ConvertSyncBatchNorm()], "use_distributed_sampler": False}
    fitting = trainer(**(defaults | settings))
    fitting.fit(model, loader(world_size))
    return fitting


@pytest.mark.parametrize("strategy", ["ours", "lightning"])
@ranks(1, 2, 3, init=False)
def test_fit_equals_one_process(world_size, strategy):
    model = Model()
    fit(model, world_size, strategy=CustomDDPStrategy() if strategy == "ours" else DDPStrategy())
    assert_equal_weights(model.net, train_in_one_process(network(), world_size))
    assert (SyncedBatchNorm1d in model.classes) == (world_size > 1)
    assert type(model.net[1]) is nn.BatchNorm1d


def fit_without_the_callback():
    model = Model()
    trainer(use_distributed_sampler=False).fit(model, loader(2))
    assert_equal_weights(model.net, train_in_one_process(network(), 2))


def test_the_comparison_notices_a_missing_conversion():
    with pytest.raises(RankFailureError, match="Tensor-likes are not close"):
        run_ranks(fit_without_the_callback, 2, init=False)


@ranks(2, init=False)
def test_factories_reach_the_fit():
    model = Model(network(ScaledBatchNorm))
    original = model.net[1]
    fit(model, 2, ConvertSyncBatchNorm(factories={ScaledBatchNorm: synced_scaled}))
    assert SyncedScaledBatchNorm in model.classes
    assert model.net[1] is original
    assert_equal_weights(model.net, train_in_one_process(network(ScaledBatchNorm), 2))


@ranks(2, init=False)
def test_the_users_sync_batch_norm_trains_on_the_cpu_and_keeps_its_type():
    model = Model(network(nn.SyncBatchNorm))
    fit(model, 2)
    assert SyncedBatchNorm in model.classes
    assert type(model.net[1]) is nn.SyncBatchNorm
    assert_equal_weights(model.net, train_in_one_process(network(), 2))


@ranks(4, init=False)
def test_num_ranks_limits_who_shares():
    model = Model()
    model.net[1].register_forward_hook(remember_mean)
    fit(model, 4, ConvertSyncBatchNorm(num_ranks=2), max_steps=1)
    rank = int(os.environ["RANK"])
    x, _ = samples(4)
    pair = [2 * (rank // 2), 2 * (rank // 2) + 1]
    rows = [row for row in range(PER_RANK * 4) if row % 4 in pair]
    wanted = network()[0](x[rows]).mean(0)
    torch.testing.assert_close(model.net[1].first_mean / 0.1, wanted, rtol=1e-10, atol=1e-10)


def remember_mean(module, args, output):
    module.first_mean = module.running_mean.clone()  # momentum times the mean of the first batch


@ranks(2, init=False)
def test_num_ranks_must_divide_the_world_size():
    with pytest.raises(ValueError, match=r"num_ranks=3 and 2 processes"):
        fit(Model(), 2, ConvertSyncBatchNorm(num_ranks=3))


class Failing(Model):
    def training_step(self, batch, batch_idx):
        assert type(self.net[1]) is SyncedBatchNorm1d
        raise FloatingPointError("no convergence")


@ranks(2, init=False)
def test_the_layers_come_back_after_an_exception():
    model = Failing()
    callback = ConvertSyncBatchNorm()
    with pytest.raises(FloatingPointError):
        fit(model, 2, callback)
    assert type(model.net[1]) is nn.BatchNorm1d
    assert callback.converted == []


class Watching(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        self.converted = list(trainer.callbacks[0].converted)


@ranks(2, init=False)
def test_a_second_fit_converts_again_and_evaluation_does_not():
    model, callback, watch = Model(), ConvertSyncBatchNorm(), Watching()
    fitting = trainer(callbacks=[callback, watch])
    for _ in range(2):
        watch.converted = []
        fitting.fit(model, loader(2))
        assert watch.converted == ["net.1", "net.4"]
        assert callback.converted == []
        fitting.fit_loop.max_epochs += 1
    model.classes.clear()
    fitting.validate(model, loader(2), verbose=False)
    assert type(model.net[1]) is nn.BatchNorm1d


@ranks(2, init=False)
def test_validation_inside_fit_needs_no_equal_numbers_of_batches():
    """A rank that has less to validate must not leave the other in a collective."""
    model = Model()
    x, y = samples(2)
    rank = int(os.environ["RANK"])
    part = DataLoader(TensorDataset(x[: 1 + 2 * rank], y[: 1 + 2 * rank]), batch_size=1)
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in DDP_ARGUMENTS else "broadcast_buffers"
    fitting = trainer(
        callbacks=[ConvertSyncBatchNorm()],
        strategy=CustomDDPStrategy(**{buffers: False}),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    fitting.fit(model, loader(2), part)
    assert SyncedBatchNorm1d in model.classes


@ranks(2, init=False)
def test_checkpoints_of_a_fit_load_into_the_plain_model(tmp_path):
    model = Model()
    saving = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=2)
    fit(model, 2, max_steps=2, enable_checkpointing=True, callbacks=[ConvertSyncBatchNorm(), saving])
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    plain = Model()
    plain.load_state_dict(state, strict=True)
    assert_equal_weights(plain.net, model.net)


class Configured(Model):
    """Makes its layers where models of many parameters make them."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.net, self.norm = nn.Sequential(), norm

    def configure_model(self):
        if not len(self.net):
            self.net = network(self.norm)


@ranks(2, init=False)
def test_layers_made_in_configure_model_are_converted_too():
    model = Configured()
    fit(model, 2)
    assert SyncedBatchNorm1d in model.classes
    assert_equal_weights(model.net, train_in_one_process(network(), 2))


@ranks(2, init=False)
def test_a_factory_is_too_late_for_layers_made_in_configure_model():
    with pytest.raises(DDPPluginError, match=r"net\.1.*made in configure_model"):
        fit(Configured(ScaledBatchNorm), 2, ConvertSyncBatchNorm(factories={ScaledBatchNorm: synced_scaled}))


class Replacing(Model):
    """Does what Lightning's own conversion does: puts other objects in the place of the converted ones."""

    def configure_model(self):
        self.net[1] = nn.BatchNorm1d(5).double()


@ranks(2, init=False)
def test_a_second_conversion_by_somebody_else_is_refused():
    with pytest.raises(DDPPluginError, match="sync_batchnorm=True"):
        fit(Replacing(), 2)


def spoken(callback, model, world_size, **settings):
    said = {"info": [], "warn": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_sync_batchnorm, "rank_zero_info", said["info"].append)
        patch.setattr(convert_sync_batchnorm, "rank_zero_warn", said["warn"].append)
        fit(model, world_size, callback, **settings)
    return said


@ranks(2, init=False)
def test_what_was_converted_is_said():
    said = spoken(ConvertSyncBatchNorm(), Model(), 2)
    assert said["info"] == [
        "ConvertSyncBatchNorm: 2 BatchNorm layers use the statistics of all processes: net.1, net.4."
    ]
    assert said["warn"] == []


@ranks(1, init=False)
def test_one_process_is_left_alone_with_a_message():
    said = spoken(ConvertSyncBatchNorm(num_ranks=2), Model(), 1, strategy="auto")
    assert "one process" in said["info"][0]
    assert said["warn"] == []


@ranks(2, init=False)
def test_skipped_layers_are_named():
    said = spoken(ConvertSyncBatchNorm(), Model(network(ScaledBatchNorm)), 2)
    assert len(said["warn"]) == 1
    assert "'net.1' was skipped" in said["warn"][0]
    assert "ScaledBatchNorm" in said["warn"][0]


@ranks(2, init=False)
def test_a_model_without_batch_norm_is_warned_of():
    said = spoken(ConvertSyncBatchNorm(), Model(nn.Sequential(nn.Linear(3, 1)).double()), 2)
    assert "no BatchNorm layer" in said["warn"][0]


@ranks(1, 2, init=False)
def test_accumulation_is_warned_of_once(world_size):
    said = spoken(ConvertSyncBatchNorm(), Model(), world_size, accumulate_grad_batches=2, max_epochs=2)
    assert len(said["warn"]) == 1
    assert "accumulated over 2 micro-batches" in said["warn"][0]


@ranks(2, init=False)
def test_an_uninitialised_lazy_layer_raises_before_training():
    model = Model(nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d()).double())
    with pytest.raises(ValueError, match="LazyBatchNorm1d that has not seen an input"):
        fit(model, 2)


def test_construction_has_no_side_effects_and_checks_numbers():
    ConvertSyncBatchNorm()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="num_ranks"):
        ConvertSyncBatchNorm(num_ranks=0)


def test_the_command_line_reads_the_constructor():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ConvertSyncBatchNorm, "callback")
    built = parser.instantiate(parser.parse_args(["--callback.num_ranks=4"]))
    assert built.callback.num_ranks == 4
