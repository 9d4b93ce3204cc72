"""The image recipe: the network, the images, and the whole run beside one process and beside plain torch."""

import contextlib
import csv
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from classifier import ImageClassifier, Sizes
from images import Images, shift_and_flip, stratified_split
from residual import BasicBlock, Bottleneck, resnet, training_flops
from resnet import main, steps_per_epoch
from saving import saved_steps
from settings import SettingsError, load_settings
from sources import load_images
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_plugin.data.epochs import share_epoch, tell_epoch
from tests.harness import ROOT, run_ranks
from tests.twins import resnet_twin

# ------------------------------------------------------------------------------------------------------- the network

# Written out from torchvision's weights: for each stage, blocks and the (in, out, kernel) of a block's convolutions,
# for the first block and for the others, and the shape of the projection, if the first block has one.
BASIC = {
    1: ([(64, 64, 3), (64, 64, 3)], [(64, 64, 3), (64, 64, 3)], None),
    2: ([(64, 128, 3), (128, 128, 3)], [(128, 128, 3), (128, 128, 3)], (64, 128)),
    3: ([(128, 256, 3), (256, 256, 3)], [(256, 256, 3), (256, 256, 3)], (128, 256)),
    4: ([(256, 512, 3), (512, 512, 3)], [(512, 512, 3), (512, 512, 3)], (256, 512)),
}
BOTTLENECK = {
    1: ([(64, 64, 1), (64, 64, 3), (64, 256, 1)], [(256, 64, 1), (64, 64, 3), (64, 256, 1)], (64, 256)),
    2: ([(256, 128, 1), (128, 128, 3), (128, 512, 1)], [(512, 128, 1), (128, 128, 3), (128, 512, 1)], (256, 512)),
    3: ([(512, 256, 1), (256, 256, 3), (256, 1024, 1)], [(1024, 256, 1), (256, 256, 3), (256, 1024, 1)], (512, 1024)),
    4: ([(1024, 512, 1), (512, 512, 3), (512, 2048, 1)], [(2048, 512, 1), (512, 512, 3), (512, 2048, 1)], (1024, 2048)),
}
NETWORKS = {
    "resnet18": (BASIC, (2, 2, 2, 2), 512, 11_689_512),
    "resnet34": (BASIC, (3, 4, 6, 3), 512, 21_797_672),
    "resnet50": (BOTTLENECK, (3, 4, 6, 3), 2048, 25_557_032),
}


def expected_shapes(name):
    table, depths, features, _ = NETWORKS[name]
    shapes = {}

    def norm(key, channels):
        shapes.update({f"{key}.{part}": (channels,) for part in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{key}.num_batches_tracked"] = ()

    shapes["conv1.weight"] = (64, 3, 7, 7)
    norm("bn1", 64)
    for stage, depth in enumerate(depths, start=1):
        first, others, projection = table[stage]
        for block in range(depth):
            for number, (channels_in, channels_out, kernel) in enumerate(others if block else first, start=1):
                shapes[f"layer{stage}.{block}.conv{number}.weight"] = (channels_out, channels_in, kernel, kernel)
                norm(f"layer{stage}.{block}.bn{number}", channels_out)
        if projection is not None:
            shapes[f"layer{stage}.0.downsample.0.weight"] = (projection[1], projection[0], 1, 1)
            norm(f"layer{stage}.0.downsample.1", projection[1])
    shapes["fc.weight"], shapes["fc.bias"] = (1000, features), (1000,)
    return shapes


@pytest.mark.parametrize("name", NETWORKS)
def test_names_and_shapes_are_those_of_torchvisions_weights(name):
    with torch.device("meta"):
        model = resnet(name)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == expected_shapes(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == NETWORKS[name][3]


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_equal_torchvisions_with_its_weights(name):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    theirs, ours = getattr(models, name)().double(), resnet(name).double()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-12, atol=1e-12)


def reference_convolution(x, weight, stride):
    """A convolution as one matrix product over patches."""
    kernel = weight.shape[-1]
    out = [(size + 2 * (kernel // 2) - kernel) // stride + 1 for size in x.shape[-2:]]
    patches = F.unfold(x, kernel, padding=kernel // 2, stride=stride)
    return torch.einsum("op,npl->nol", weight.flatten(1), patches).unflatten(-1, out)


def reference_norm(x, state, key, is_training):
    if is_training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    else:
        mean, variance = state[f"{key}.running_mean"], state[f"{key}.running_var"]
    scale = state[f"{key}.weight"] / (variance + 1e-5).sqrt()
    return (x - mean[:, None, None]) * scale[:, None, None] + state[f"{key}.bias"][:, None, None]


def reference_block(x, state, num_convolutions, strided, stride, is_training):
    y = x
    for number in range(1, num_convolutions + 1):
        y = reference_convolution(y, state[f"conv{number}.weight"], stride if number == strided else 1)
        y = reference_norm(y, state, f"bn{number}", is_training)
        if number < num_convolutions:
            y = y.clamp(min=0)
    if "downsample.0.weight" in state:
        x = reference_convolution(x, state["downsample.0.weight"], stride)
        x = reference_norm(x, state, "downsample.1", is_training)
    return (x + y).clamp(min=0)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("block", "num_convolutions", "strided"), [(BasicBlock, 2, 1), (Bottleneck, 3, 2)])
@pytest.mark.parametrize(("in_channels", "stride"), [(12, 2), (12, 1), (5, 1)])
def test_block_equals_the_formula(block, num_convolutions, strided, in_channels, stride, is_training):
    torch.manual_seed(0)
    width = 12 // block.expansion
    module = block(in_channels, width, stride).double().train(is_training)
    with torch.no_grad():
        for buffer in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
            buffer.copy_(torch.rand_like(buffer) + 0.1)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    assert ("downsample.0.weight" in state) == (stride != 1 or in_channels != 12)
    x = torch.randn(3, in_channels, 7, 6, dtype=torch.float64)
    wanted = reference_block(x.clone(), state, num_convolutions, strided, stride, is_training)
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)


def test_zero_initialised_branches_leave_their_input():
    model = resnet("resnet50", num_classes=3, width=4, zero_init_residual=True)
    x = torch.rand(2, 16, 5, 5)  # not negative, so that the last relu changes nothing
    assert torch.equal(model.layer1[1](x), x)
    assert not torch.equal(resnet("resnet50", num_classes=3, width=4).layer1[1](x), x)


@pytest.mark.parametrize(("stem", "side", "wanted"), [("cifar", 32, 32), ("imagenet", 224, 56), ("cifar", 8, 8)])
def test_stems(stem, side, wanted):
    with torch.device("meta"):
        model = resnet("resnet18", stem=stem, in_channels=1)
        x = torch.empty(2, 1, side, side)
    seen = []
    model.layer1.register_forward_hook(lambda _module, inputs, _output: seen.append(tuple(inputs[0].shape)))
    assert model(x).shape == (2, 1000)
    assert seen == [(2, 64, wanted, wanted)]


def test_unknown_networks_and_stems_are_refused():
    with pytest.raises(ValueError, match=r"Got 'resnet19'"):
        resnet("resnet19")
    with pytest.raises(ValueError, match=r"Got 'vit'"):
        resnet("resnet18", stem="vit")
    with pytest.raises(ValueError, match=r"in_channels to be at least 1"):
        resnet("resnet18", in_channels=0)


def test_training_flops_equal_the_sum_over_layers():
    with torch.device("meta"):
        model = resnet("resnet50")
    sizes = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(lambda m, i, output, name=name: sizes.update({name: (m.weight, output.shape)}))
    model(torch.empty(1, 3, 224, 224, device="meta"))
    forward = {name: 2 * weight.numel() * (shape[2:].numel()) for name, (weight, shape) in sizes.items()}
    assert 8.1e9 < sum(forward.values()) < 8.3e9  # 4.09 thousand million multiply-adds, as published
    # Each layer once more for its weight and once more for its input; the first one's input needs no gradient.
    assert training_flops(model, (3, 224, 224)) == 3 * sum(forward.values()) - forward["conv1"]
    with pytest.raises(ValueError, match="meta device"):
        training_flops(resnet("resnet18", width=1), (3, 32, 32))


# -------------------------------------------------------------------------------------------------------- the images


def contents(images):
    return [(tuple(image.flatten().tolist()), label) for image, label in images]


def test_digits_are_split_without_overlap_and_by_class():
    from sklearn.datasets import load_digits

    splits = load_images("digits", augment=False, seed=3)
    assert splits.image_shape == (1, 8, 8)
    assert splits.classes == tuple("0123456789")
    assert (len(splits.train), len(splits.val), len(splits.test)) == (1257, 180, 360)
    parts = [contents(part) for part in (splits.train, splits.val, splits.test)]
    # The mean and deviation are the training images' own.
    raw = torch.from_numpy(load_digits().images).double()
    pixels = torch.tensor([pixel for image, _ in parts[0] for pixel in image], dtype=torch.float64)
    assert abs(pixels.mean()) < 1e-5
    assert abs(pixels.std() - 1) < 1e-5
    # Undoing the normalisation gives exactly the images of the package, each as often as there.
    train_rows = splits.train.transform
    undone = sorted(
        (tuple(int(round(p * float(train_rows.std) + float(train_rows.mean))) for p in image), label)
        for part in parts
        for image, label in part
    )
    wanted = sorted(
        (tuple(image.flatten().int().tolist()), int(label))
        for image, label in zip(raw, load_digits().target, strict=True)
    )
    assert undone == wanted
    for part in parts:
        counts = np.bincount([label for _, label in part], minlength=10)
        shares = np.bincount(load_digits().target) * len(part) / 1797
        assert np.abs(counts - shares).max() < 2
    again = load_images("digits", augment=False, seed=3)
    assert contents(again.train) == parts[0]
    assert contents(load_images("digits", augment=False, seed=4).test) != parts[2]


def test_stratified_split_keeps_every_index_once_and_its_sizes():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 21)
    parts = stratified_split(labels, [10, 21], seed=0)
    assert [len(part) for part in parts] == [10, 21, 70]
    assert sorted(torch.cat(parts).tolist()) == list(range(101))
    assert torch.bincount(labels[parts[0]]).tolist() == [5, 3, 2]
    with pytest.raises(ValueError, match="some left over"):
        stratified_split(labels, [50, 51], seed=0)


def test_shifts_move_the_image_and_fill_with_black():
    image = torch.arange(1, 13).view(1, 3, 4)
    seen = set()
    for seed in range(300):
        torch.manual_seed(seed)
        seen.add(tuple(shift_and_flip(image, 1, flip=True).flatten().tolist()))
    wanted = set()
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            moved = torch.zeros_like(image)
            for row in range(3):
                for column in range(4):
                    if 0 <= row + down < 3 and 0 <= column + right < 4:
                        moved[0, row + down, column + right] = image[0, row, column]
            wanted |= {tuple(moved.flatten().tolist()), tuple(moved.flip(-1).flatten().tolist())}
    assert seen == wanted


def noisy(image):
    return image + torch.rand(image.shape)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_belongs_to_seed_epoch_and_index(num_workers):
    def images(seed):
        return Images(TensorDataset(torch.zeros(6, 1, 2, 2), torch.arange(6)), noisy, seed)

    def epoch(dataset, number, order=range(6)):
        dataset.set_epoch(number)
        return {label: dataset[index][0] for index in order for label in [dataset[index][1]]}

    reference = images(7)
    first, second = epoch(reference, 0), epoch(reference, 1)
    assert len({tuple(value.flatten().tolist()) for value in (*first.values(), *second.values())}) == 12
    before = torch.get_rng_state()
    assert all(torch.equal(value, first[label]) for label, value in epoch(images(7), 0, (3, 0, 5)).items())
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(images(8)[0][0], first[0])
    dataset = images(7)
    # Workers that live on see the new epoch too, as SamplerEpoch tells it.
    loader = share_epoch(DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0))
    for number, wanted in ((0, first), (1, second), (0, first)):
        tell_epoch(loader, number)
        batches = list(loader)
        assert torch.equal(torch.cat([b[0] for b in batches]), torch.stack(list(wanted.values())))


def test_digits_take_no_folder_and_names_are_checked():
    with pytest.raises(ValueError, match=r"no data\.path"):
        load_images("digits", "/tmp")
    with pytest.raises(ValueError, match=r"'mnist'"):
        load_images("mnist")
    with pytest.raises(ValueError, match=r"data\.num_classes=11.*Got 10"):
        load_images("digits", num_classes=11)
    with pytest.raises(ValueError, match=r"data\.validation_ratio between 0 and 1"):
        load_images("digits", validation_ratio=1.5)


def write_cifar(folder, num_images=20, **changes):
    """Writes files of CIFAR-10's format; the pixels of an image tell the file, its place and the channel."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        data = np.zeros((num_images, 3, 32, 32), dtype=np.uint8)
        data[:, :, 0, 0] = 10 * number + np.arange(3)
        data[:, :, 31, 0] = np.arange(num_images)[:, None]
        batch = {"data": data.reshape(num_images, -1), "labels": [index % 10 for index in range(num_images)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    for name, content in changes.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
    return folder


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-py"])
def test_cifar_folder(tmp_path, inner):
    write_cifar(tmp_path / inner)
    splits = load_images("cifar10", str(tmp_path), augment=False, num_classes=10)
    assert splits.image_shape == (3, 32, 32)
    assert splits.classes[3] == "cat"
    assert (len(splits.train), len(splits.val), len(splits.test)) == (90, 10, 20)
    assert not splits.test_is_val
    normalise = splits.test.transform
    seen = set()
    for part in (splits.train, splits.val, splits.test):
        for image, label in part:
            raw = (image * normalise.std + normalise.mean).round().int()
            assert raw[1, 0, 0] == raw[0, 0, 0] + 1
            assert raw[2, 0, 0] == raw[0, 0, 0] + 2
            index = int(raw[0, 31, 0])
            assert label == index % 10
            seen.add((int(raw[0, 0, 0]) // 10, index))
    assert seen == {(file, index) for file in range(6) for index in range(20)}
    assert all(int((i * normalise.std + normalise.mean).round()[0, 0, 0]) == 50 for i, _ in splits.test)


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


GOOD = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3", b"\x80\x02garbage", "data_batch_3"),
        ("data_batch_3", b"", "data_batch_3"),
        ("data_batch_3", Evil(), "system, which has no place"),
        ("data_batch_3", [1, 2], "Got a list"),
        ("data_batch_3", {**GOOD, "data": np.zeros((2, 100), np.uint8)}, r"uint8 \(N, 3072\). Got uint8 \(2, 100\)"),
        ("data_batch_3", {**GOOD, "data": np.zeros((2, 3072), np.float32)}, "Got float32"),
        ("data_batch_3", {**GOOD, "labels": [0]}, "to hold 2 'labels'.*Got 1"),
        ("data_batch_3", {**GOOD, "labels": [0, 10]}, "labels from 0 to 9"),
        ("batches.meta", {"label_names": ["a", "b"]}, "10 label_names"),
    ],
)
def test_broken_cifar_files_are_refused(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path / "cifar", **{name: content})
    with pytest.raises(ValueError, match=message):
        load_images("cifar10", "cifar")
    assert not Path("pwned").exists()


def test_a_truncated_or_missing_cifar_file_is_named(tmp_path):
    write_cifar(tmp_path)
    whole = (tmp_path / "test_batch").read_bytes()
    (tmp_path / "test_batch").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"test_batch"):
        load_images("cifar10", str(tmp_path))
    (tmp_path / "data_batch_2").unlink()
    with pytest.raises(ValueError, match=r"none of the names \['data_batch_2'\]"):
        load_images("cifar10", str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.path to be a folder"):
        load_images("cifar10", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"Add data\.path=FOLDER"):
        load_images("cifar10")


def write_folder(folder, splits=("train", "val"), classes=("cat", "dog"), num_images=3):
    image_module = pytest.importorskip("PIL.Image")
    for split in splits:
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for number in range(num_images):
                pixels = np.full((40, 50, 3), 100 * label + number, np.uint8)
                image_module.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def needs_torchvision():
    pytest.importorskip("torchvision.datasets", exc_type=(ImportError, RuntimeError))


def test_image_folders(tmp_path):
    needs_torchvision()
    write_folder(tmp_path)
    splits = load_images("imagefolder", str(tmp_path), image_size=32, num_classes=2)
    assert splits.classes == ("cat", "dog")
    assert splits.test_is_val
    assert (len(splits.train), len(splits.val)) == (6, 6)
    image, label = splits.val[4]
    assert image.shape == (3, 32, 32)
    assert label == 1
    wanted = (torch.tensor([101.0] * 3) / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(image[:, 5, 5], wanted)
    assert torch.equal(splits.train[0][0], splits.train[0][0])
    write_folder(tmp_path, splits=("test",), classes=("cat", "dog", "emu"))
    with pytest.raises(ValueError, match=r"only in one of them: emu"):
        load_images("imagefolder", str(tmp_path), image_size=32)


def test_broken_image_folders_are_refused(tmp_path):
    needs_torchvision()
    with pytest.raises(ValueError, match=r"Got no folder train/"):
        load_images("imagefolder", str(tmp_path))
    write_folder(tmp_path)
    with pytest.raises(ValueError, match=r"data\.num_classes=1000.*Got 2"):
        load_images("imagefolder", str(tmp_path), image_size=32, num_classes=1000)
    (tmp_path / "val" / "dog" / "0.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"dog/0\.png"):
        load_images("imagefolder", str(tmp_path), image_size=32)
    for file in (tmp_path / "val" / "dog").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"images of each class"):
        load_images("imagefolder", str(tmp_path), image_size=32)


@pytest.mark.parametrize("error", [ImportError("none"), RuntimeError("operator torchvision::nms does not exist")])
def test_without_a_torchvision_that_works_the_extra_is_named(tmp_path, monkeypatch, error):
    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torchvision":
                raise error

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"pip install 'ddp_plugin\[vision\]'"):
        load_images("imagefolder", str(tmp_path))


# ------------------------------------------------------------------------------------------------------- the whole run


def start_recipe(folder, *arguments):
    """Starts the script as a person would, without a progress bar, with a small network."""
    arguments = [f"output_dir={folder}", "trainer.progress_bar=false", "model.width=8", *arguments]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / "resnet.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        start_new_session=True,  # so that both of its processes can be ended
    )


def finish_recipe(process):
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        kill(process)
    return process.returncode, output


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_recipe(folder, *arguments):
    status, output = finish_recipe(start_recipe(folder, *arguments))
    assert status == 0, output
    return output


WHOLE = ("trainer.max_epochs=3", "data.test_ratio=0.1503", "seed=5")


def load_newest(folder):
    steps = saved_steps(folder / "checkpoints")
    return torch.load(steps[max(steps)], weights_only=True)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_recipe(folder, *WHOLE), load_newest(folder)


def logged(folder, column, version=0):
    with open(folder / "logs" / f"version_{version}" / "metrics.csv") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def read_accuracy(output):
    found = re.search(r"test accuracy +([\d.]+)% \((\d+)/(\d+) images, each counted once\)", output)
    assert found is not None, output
    return float(found[1]), int(found[2]), int(found[3])


def test_the_accuracy_of_two_processes_is_that_of_one(whole_run):
    # 271 images do not divide by two: a padded sampler would count one of them twice.
    folder, output, checkpoint = whole_run
    percent, num_correct, num_images = read_accuracy(output)
    model = resnet("resnet18", num_classes=10, in_channels=1, stem="cifar", width=8)
    model.load_state_dict({key.removeprefix("network."): value for key, value in checkpoint["state_dict"].items()})
    splits = load_images("digits", seed=5, test_ratio=0.1503)
    with torch.no_grad():
        model.eval()
        wanted = sum(int(model(image[None]).argmax()) == label for image, label in splits.test)
    assert (num_correct, num_images) == (wanted, 271)
    assert percent == round(100 * wanted / 271, 2)
    assert num_correct > 0.5 * num_images  # it learned something in three epochs
    assert logged(folder, "val/num_images") == [180.0, 180.0, 180.0]


@pytest.mark.long
def test_the_default_network_reads_97_of_100_digits(tmp_path):
    # The defaults but for their length: 8 of the 20 epochs.
    output = run_recipe(tmp_path, "model.width=24", "trainer.max_epochs=8")
    _, num_correct, num_images = read_accuracy(output)
    assert num_images == 360
    assert num_correct >= 0.97 * num_images


def test_the_plan_is_what_happens(whole_run):
    folder, output, checkpoint = whole_run
    # 1797 images without 271 for the test and 180 for validation; half for each process, in full batches of 32.
    num_steps = 3 * ((1797 - 271 - 180 + 1) // 2 // 32)
    assert checkpoint["global_step"] == num_steps
    assert f"length              {num_steps} steps" in output
    assert "learning rate       0.1 at its peak, after 21 steps of warm-up" in output
    assert "Effective batch: 32 per process x 2 processes x 1 accumulation = 64; learning rates x 2 (linear" in output
    assert "ConvertSyncBatchNorm: 20 BatchNorm layers use the statistics of all processes" in output
    assert "images/s" in output
    best = torch.load(folder / "best.ckpt", weights_only=True)
    accuracies = logged(folder, "val/top1")
    assert best["epoch"] == accuracies.index(max(accuracies))


@pytest.mark.long
def test_a_run_that_was_killed_ends_with_the_same_weights(whole_run, tmp_path):
    process = start_recipe(tmp_path, *WHOLE)
    try:
        while not saved_steps(tmp_path / "checkpoints"):  # until the end of the first epoch
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        kill(process)
        process.stdout.close()
    assert load_newest(tmp_path)["global_step"] < whole_run[2]["global_step"]
    output = run_recipe(tmp_path, *WHOLE, "resume=auto")
    assert "AutoResume: goes on at step" in output
    weights = load_newest(tmp_path)["state_dict"]
    assert weights.keys() == whole_run[2]["state_dict"].keys()
    for key, value in whole_run[2]["state_dict"].items():
        assert torch.equal(value, weights[key]), key
    assert read_accuracy(output) == read_accuracy(whole_run[1])


def test_two_processes_with_workers_train_as_one_without(tmp_path):
    # Into the second epoch, with synchronised BatchNorm, augmentation and the learning rate of the effective batch.
    weights = []
    for name, *arguments in (
        ("one", "trainer.devices=1", "trainer.batch_size=64"),
        ("two", "trainer.devices=2", "trainer.batch_size=32", "data.num_workers=1"),
    ):
        (tmp_path / name).mkdir()
        run_recipe(tmp_path / name, "trainer.precision=64-true", "trainer.max_steps=22", *arguments)
        checkpoint = load_newest(tmp_path / name)
        assert checkpoint["global_step"] == 22
        weights.append(checkpoint["state_dict"])
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-10, atol=1e-10)


def test_first_losses_are_those_of_the_plain_torch_twin(tmp_path):
    # Twenty steps reach into the second epoch: order and augmentation of both are compared too. Bit for bit.
    settings = {
        "seed": 11,
        "batch_size": 16,
        "learning_rate": 0.04,
        "base_batch_size": 8,
        "warmup_epochs": 0.1,
        "weight_decay": 1e-3,
    }
    run_recipe(
        tmp_path,
        "sync_batchnorm=false",
        "trainer.max_steps=50",
        "trainer.log_every=1",
        f"seed={settings['seed']}",
        f"trainer.batch_size={settings['batch_size']}",
        *(f"optimizer.{key}={settings[key]}" for key in list(settings)[2:]),
    )
    twin = run_ranks(resnet_twin.losses, 2, num_steps=50, width=8, **settings)
    recipe = logged(tmp_path, "train/loss")
    assert len(recipe) == 50
    assert recipe == twin[0]
    assert recipe != twin[1]  # each rank has images of its own
    assert sum(recipe[-5:]) < sum(recipe[:5])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ["64 samples", "0.1 at its peak", "1,257 to train, 180 to validate, 360 to test"]),
        (
            ["trainer.global_batch_size=256"],
            [
                "32 per process x 2 processes x 4 accumulated = 256 samples",
                "0.4 at its peak",
                "100 steps, 25,600 images",
            ],
        ),
        (
            ["config=a100_8x"],
            [
                "256 per process x 8 processes x 1 accumulated = 2,048 samples",
                "0.8 at its peak",
                "25,557,032 parameters",
            ],
        ),
        (
            ["config=a100_multinode"],
            ["256 per process x 32 processes x 1 accumulated = 8,192 samples", "3.2 at its peak", "1,281,167 to train"],
        ),
    ],
)
def test_dry_runs_print_the_plan_and_start_nothing(tmp_path, monkeypatch, capsys, arguments, wanted):
    monkeypatch.chdir(tmp_path)
    main([*arguments, "dry_run=true"])
    output = capsys.readouterr().out
    for text in wanted:
        assert text in output
    assert not list(tmp_path.iterdir())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.name=cifar10", "data.path=nowhere"], "data.path to be a folder"),
        (["data.num_classes=11"], "data.num_classes=11"),
        (["data.num_train_images=1258"], "Got 1257"),
        (["trainer.batch_size=1000"], "at least 1000 training images"),
        (["trainer.batch_size=1"], "more than 1 value per channel"),
        (["optimizer.warmup_epochs=20.0"], "a warm-up shorter than the run"),
        (["model.name=resnet99"], "Got 'resnet99'"),
        (["model.depth=3"], "model.depth"),
        (["resume=true"], "Write resume=auto"),
        (["resume=nowhere.ckpt"], "resume= to name a checkpoint"),
        (["checkpoint.keep=0"], "checkpoint.keep to be at least 1"),
        (["config=a100_8x", "data.path=nowhere"], "data.path to be a folder"),
        (["strategy.bucket_cap_mb=few"], "strategy.bucket_cap_mb=few"),
        (["optimizer.warmup_from=there"], "warmup_from"),
        (["optimizer.base_batch_size=0"], "optimizer.base_batch_size to be at least 1"),
        (["optimizer.label_smoothing=1.5"], "optimizer.label_smoothing to be between 0.0 and 1.0"),
        (["trainer.max_steps=0"], "trainer.max_steps to be at least 1"),
        (["trainer.peak_flops_per_s=-1.0"], "trainer.peak_flops_per_s to be at least 1"),
        (["trainer.peak_flops_per_s=fast"], "trainer.peak_flops_per_s to be a number"),
        (["optimizer.learning_rate=.nan"], "optimizer.learning_rate to be a number"),
        (["trainer.global_batch_size=96"], "a multiple of 32 per process x 2 processes"),
        (["trainer.global_batch_size=128", "trainer.accumulate=2"], "trainer.accumulate=1 beside"),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=re.escape(message)):
        main(arguments)
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line_without_a_traceback(tmp_path):
    status, output = finish_recipe(start_recipe(tmp_path, "data.name=mnist"))
    assert status == 1
    assert output.startswith("error: Expected data.name to be one of")
    assert output.count("\n") == 1


@pytest.mark.parametrize("change", ["model.width=9", "trainer.max_epochs=2"])
def test_a_checkpoint_that_cannot_be_continued_is_refused(whole_run, change):
    newest = max(saved_steps(whole_run[0] / "checkpoints").values())
    settings = [f"output_dir={whole_run[0]}", "model.width=8", *WHOLE, f"resume={newest}", change]
    with pytest.raises(SettingsError, match=r"model\.width 8 there, 9 here|a run longer than its checkpoint"):
        main(settings)


# ------------------------------------------------------------------------------------------------ loss and optimizer


def test_loss_is_the_cross_entropy_with_smoothed_labels():
    settings = load_settings("resnet", ["optimizer.label_smoothing=0.2", "model.width=4"])
    model = ImageClassifier(settings, Sizes(100, 7, (1, 8, 8))).double()
    model.log = lambda *_args, **_kwargs: None
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    labels = torch.tensor([0, 6, 3, 3, 1, 5])
    log_p = model(images).log_softmax(dim=1)
    wanted = -sum(0.8 * log_p[i, label] + 0.2 / 7 * log_p[i].sum() for i, label in enumerate(labels)) / 6
    model.zero_grad()
    torch.testing.assert_close(model.training_step((images, labels), 0), wanted, rtol=1e-12, atol=0)


def test_norms_and_biases_do_not_decay():
    settings = load_settings("resnet", ["optimizer.weight_decay=0.25", "model.width=4"])
    model = ImageClassifier(settings, Sizes(100, 7, (1, 8, 8)))
    optimizer = model.configure_optimizers()
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.network.named_parameters():
        is_kernel = "conv" in name or name.endswith("downsample.0.weight") or name == "fc.weight"
        assert decay.pop(id(parameter)) == (0.25 if is_kernel else 0.0), name
    assert not decay
    assert isinstance(optimizer, torch.optim.SGD)
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("num_images", "num_ranks", "batch_size", "num_accumulated", "wanted"),
    [(1257, 2, 32, 1, 19), (1257, 2, 32, 4, 5), (64, 2, 32, 1, 1), (63, 2, 32, 1, 1), (1_281_167, 8, 256, 1, 625)],
)
def test_steps_per_epoch(num_images, num_ranks, batch_size, num_accumulated, wanted):
    assert steps_per_epoch(num_images, num_ranks, batch_size, num_accumulated) == wanted
