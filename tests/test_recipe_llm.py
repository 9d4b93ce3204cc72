"""The language-model recipe, against plain torch and arithmetic done by hand."""

import csv
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llm import FACTS, LanguageModel, TextData, make_plan
from plan import activation_bytes
from run import SAMPLES_PER_STEP, checkpoint_to_load, facts_of, refuse_other_run
from settings import SettingsError, load_settings
from text import (
    BlockDataset,
    Piece,
    TokenFiles,
    bits_per_byte,
    find_corpus,
    order0_bits_per_byte,
    train_tokenizer,
)
from transformer import (
    IGNORED,
    Transformer,
    TransformerConfig,
    apply_rotary,
    generate,
    grouped_query_attention,
    rotary_angles,
    token_nats,
)

from ddp_plugin import default_callbacks
from tests.harness import ranks, run_ranks, trainer
from tests.twins import llm_twin

ROOT = Path(__file__).resolve().parent.parent
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "block_size": 16,
    "num_layers": 2,
    "dim": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 40,
}


def _tiny(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(TINY | changes))


def _words(seed: int, num_words: int) -> str:
    draw = random.Random(seed)
    words = ["tensor", "rank", "gradient", "bucket", "größe", "→", "node", "step", "world", "naïve"]
    return "".join(draw.choice(words) + draw.choice([" ", "\n", ", ", "\r\n"]) for _ in range(num_words))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    for index in range(8):
        (folder / ("below" if index % 2 else "") / f"{index}.txt").write_bytes(_words(index, 900).encode())
    return folder


def _arguments(texts: Path, tmp_path: Path, *more: str) -> list[str]:
    tiny = [f"model.{name}={value}" for name, value in TINY.items() if name != "vocab_size"]
    return [
        f"data.path={texts}",
        "data.validation_ratio=0.3",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'out'}",
        f"tokenizer.vocab_size={TINY['vocab_size']}",
        *tiny,
        "trainer.batch_size=4",
        "trainer.log_every=1",
        "optimizer.warmup_steps=5",
        "sample.num_tokens=8",
        *more,
    ]


def _run(*arguments: str, timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PL_", "WORLD", "RANK", "LOCAL_", "MASTER"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "recipes" / "llm.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT)


def _logged(path: Path, column: str) -> dict[int, float]:
    with open(path) as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


# ------------------------------------------------------------------------------------------------------ the network


def test_rotary_positions_are_complex_rotations() -> None:
    heads = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    turned = apply_rotary(heads, *rotary_angles(7, 8, 100.0, like=heads))
    pairs = torch.view_as_complex(heads.unflatten(-1, (4, 2)))
    for position in range(7):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            expected = pairs[:, :, position, pair] * complex(math.cos(angle), math.sin(angle))
            got = torch.complex(turned[:, :, position, 2 * pair], turned[:, :, position, 2 * pair + 1])
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_rotary_positions_make_scores_depend_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    cosine, sine = rotary_angles(20, 8, 10000.0, like=query)
    turned_query, turned_key = (apply_rotary(x.expand(1, 1, 20, 8), cosine, sine)[0, 0] for x in (query, key))
    scores = turned_query @ turned_key.T
    for distance in range(5):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-10, atol=1e-10)


def test_grouped_query_attention_is_the_explicit_sum() -> None:
    query = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 5, 4, dtype=torch.float64)
    got = grouped_query_attention(query, key, value)
    for batch in range(2):
        for head in range(6):
            shared = head // 3
            for position in range(5):
                scores = [
                    float(query[batch, head, position] @ key[batch, shared, s]) / 2.0 for s in range(position + 1)
                ]
                weights = [math.exp(score) for score in scores]
                expected = sum(w / sum(weights) * value[batch, shared, s] for s, w in enumerate(weights))
                torch.testing.assert_close(got[batch, head, position], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_the_number_of_parameters(tie_weights: bool) -> None:
    model = Transformer(_tiny(tie_weights=tie_weights))
    # Per layer: query and output 24x24, key and value 24x12, three of 24x40, two norms of 24; then the embedding(s) and
    # the last norm.
    layer = 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40 + 2 * 24
    expected = 2 * layer + (1 if tie_weights else 2) * 320 * 24 + 24
    assert sum(p.numel() for p in model.parameters()) == expected == model.config.num_parameters
    assert (model.head.weight is model.embedding.weight) is tie_weights


def test_the_operations_for_a_token() -> None:
    products = 2 * (2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40) + 320 * 24
    attention = 2 * 2 * 16 * 24  # layers x (scores, mixing) x keys x width, one multiplication and one addition each
    for tie_weights in (True, False):
        assert _tiny(tie_weights=tie_weights).training_flops_per_token == 3 * (2 * products + 2 * attention)


def test_the_estimate_of_activations_is_near_what_autograd_keeps() -> None:
    config = _tiny(dim=64, num_heads=4, hidden_dim=160, block_size=64, num_layers=3)
    model, tokens = Transformer(config), torch.zeros(4, 64, dtype=torch.int64)
    kept = activation_bytes(model, lambda: token_nats(model(tokens), tokens))
    assert config.activation_bytes(4) == pytest.approx(kept, rel=0.01)


def test_initial_weights_are_scaled_with_depth() -> None:
    torch.manual_seed(0)
    model = Transformer(_tiny(dim=64, num_heads=4, hidden_dim=128, num_layers=8))
    block: Any = model.blocks[3]
    for weight, std in (
        (model.embedding.weight, 0.02),
        (block.attention.query.weight, 0.02),
        (block.feed_forward.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / 4),
        (block.feed_forward.out.weight, 0.02 / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.1)
    assert torch.equal(block.attention_norm.weight, torch.ones(64))


def test_the_future_does_not_change_the_past() -> None:
    torch.manual_seed(0)
    model = Transformer(_tiny()).double()
    tokens = torch.randint(0, 320, (2, 16))
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 320
    after = model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()  # every later position does see it


def test_the_loss_is_the_sum_of_negative_log_probabilities() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 4, IGNORED], [2, IGNORED, 1]])
    expected = 0.0
    for row, position, target in ((0, 0, 0), (0, 1, 4), (1, 0, 2), (1, 2, 1)):
        probabilities = logits[row, position].exp() / logits[row, position].exp().sum()
        expected -= math.log(probabilities[target])
    assert token_nats(logits, targets).item() == pytest.approx(expected, rel=1e-12)
    assert token_nats(logits.bfloat16(), targets).dtype == torch.float32


def test_sampling() -> None:
    torch.manual_seed(0)
    model = Transformer(_tiny())
    state = torch.get_rng_state()
    first = generate(model, [5, 6], 30, num_usable=300, top_k=20, seed=3)
    assert first == generate(model, [5, 6], 30, num_usable=300, top_k=20, seed=3)
    assert first != generate(model, [5, 6], 30, num_usable=300, top_k=20, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    assert first[:2] == [5, 6]
    assert len(first) == 32  # twice the block: the context slides
    assert max(generate(model, [0], 60, num_usable=7, seed=1)) < 7
    greedy = generate(model, [5, 6], 1, num_usable=320, temperature=0)
    assert greedy[-1] == int(model(torch.tensor([[5, 6]]))[0, -1].argmax())


@pytest.mark.parametrize("wrong", [{"num_kv_heads": 3}, {"dim": 20}, {"num_layers": 0}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"Expected model\.\w+ to be"):
        _tiny(**wrong)


# --------------------------------------------------------------------------------------------------------- the text


def test_any_text_makes_the_round_trip() -> None:
    tokenizer = train_tokenizer(iter(["def f(x):\n    return x\n"] * 50), 280)
    for text in ("", "  \t\r\n def", "größe → 漢字 🙂", "\x00\x7f", "<|endoftext|>", "e\u0301"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("def f(x):").ids) < 9  # it learnt something
    with pytest.raises(SettingsError, match="at least 257"):
        train_tokenizer(iter([]), 255)


def test_a_folder_is_split_by_file(texts: Path) -> None:
    (texts / "ignored.bin").write_bytes(b"\0\1")
    (texts / ".hidden").mkdir()
    (texts / ".hidden" / "secret.txt").write_text("x")
    corpus = find_corpus(str(texts), ["*.txt"], 0, 0.3)
    names = [[piece.path.name for piece in part] for part in (corpus.train, corpus.validation)]
    assert sorted(names[0] + names[1]) == [f"{i}.txt" for i in range(8)]  # each file in one of them
    total = sum(p.num_bytes for part in (corpus.train, corpus.validation) for p in part)
    held = sum(p.num_bytes for p in corpus.validation)
    assert total == sum(f.stat().st_size for f in texts.rglob("*.txt") if ".hidden" not in f.parts)
    assert 0 < held <= 0.3 * total
    assert corpus == find_corpus(str(texts), ["*.txt"], 0, 0.3)
    smaller = find_corpus(str(texts), ["*.txt"], total // 2, 0.3)
    assert sum(p.num_bytes for part in (smaller.train, smaller.validation) for p in part) <= total // 2


def test_a_file_is_split_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(100)))
    size = path.stat().st_size
    corpus = find_corpus(str(path), [], 0, 0.25)
    (train,), (validation,) = corpus.train, corpus.validation
    assert (train.start, train.stop, validation.stop) == (0, validation.start, size)
    assert path.read_bytes()[train.stop - 1 : train.stop] == b"\n"
    assert abs(validation.num_bytes - 0.25 * size) < 10
    assert "".join(train.chunks()) + "".join(validation.chunks()) == path.read_text()
    capped = find_corpus(str(path), [], 200, 0.25)
    assert 190 <= capped.validation[0].stop <= 210


def test_the_standard_library_is_a_corpus() -> None:
    corpus = find_corpus(None, ["*.txt"], 500_000, 0.1)
    pieces = [*corpus.train, *corpus.validation]
    assert 250_000 < sum(piece.num_bytes for piece in pieces) <= 500_000
    assert all(piece.path.suffix == ".py" for piece in pieces)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    cases = {
        "zeros.txt": (b"abc\0def\n" * 99, "zero bytes"),
        "latin.txt": (("größe\n" * 99).encode("latin-1"), "UTF-8"),
        "empty.txt": (b"", "empty"),
        "line.txt": (b"x" * 500, "several lines"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SettingsError, match=message):
            find_corpus(str(tmp_path / name), ["*.txt"], 0, 0.1)
    with pytest.raises(SettingsError, match="does not exist"):
        find_corpus(str(tmp_path / "nowhere"), ["*.txt"], 0, 0.1)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingsError, match="at least two files"):
        find_corpus(str(tmp_path / "folder"), ["*.txt"], 0, 0.1)
    with pytest.raises(SettingsError, match="between 0 and 1"):
        find_corpus(str(tmp_path), ["*.txt"], 0, 1.0)


def test_a_byte_that_is_no_text_far_behind_is_found_too(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"some text\n" * 20_000 + b"\xff\n" + b"more\n" * 10)
    files = TokenFiles(find_corpus(str(path), [], 0, 0.01), 300, tmp_path / "cache")
    with pytest.raises(SettingsError, match="UTF-8"):
        files.build()
    assert not files.folder.exists()
    assert list((tmp_path / "cache").iterdir()) == []


def _files(texts: Path, tmp_path: Path) -> TokenFiles:
    files = TokenFiles(find_corpus(str(texts), ["*.txt"], 0, 0.3), TINY["vocab_size"], tmp_path / "cache")
    files.build()
    return files


def test_token_files_hold_the_text(texts: Path, tmp_path: Path) -> None:
    files = _files(texts, tmp_path)
    for part, pieces in (("train", files.corpus.train), ("validation", files.corpus.validation)):
        tokens = np.fromfile(files.folder / f"{part}.bin", np.uint16).tolist()
        ends = [i for i, token in enumerate(tokens) if token == files.end_id]
        assert (ends[0], ends[-1], len(ends)) == (0, len(tokens) - 1, len(pieces) + 1)
        for piece, begin, end in zip(pieces, ends[:-1], ends[1:], strict=True):
            decoded = files.tokenizer.decode(tokens[begin + 1 : end])
            assert decoded.encode() == piece.path.read_bytes()
        assert int(files.token_bytes()[tokens].sum()) == sum(piece.num_bytes for piece in pieces)


def test_the_cache_is_used_and_left_when_something_changes(texts: Path, tmp_path: Path) -> None:
    files = _files(texts, tmp_path)
    marker = files.folder / "marker"
    marker.touch()
    assert _files(texts, tmp_path).folder == files.folder
    assert marker.exists()
    other = TokenFiles(files.corpus, TINY["vocab_size"] + 1, tmp_path / "cache")
    assert other.folder != files.folder
    (texts / "0.txt").write_text("something else\n")
    assert _files(texts, tmp_path).folder != files.folder


def test_another_process_may_build_the_same_files_first(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TokenFiles(find_corpus(str(texts), ["*.txt"], 0, 0.3), TINY["vocab_size"], tmp_path / "cache")

    def outrun(*arguments: Any) -> Any:
        files.folder.mkdir()
        (files.folder / "marker").touch()
        return train_tokenizer(*arguments)

    monkeypatch.setattr("text.train_tokenizer", outrun)
    files.build()
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == [files.folder.name, "marker"]


def test_blocks_predict_every_token_once(texts: Path, tmp_path: Path) -> None:
    files = _files(texts, tmp_path)
    tokens = np.fromfile(files.folder / "validation.bin", np.uint16).astype(np.int64)
    blocks = files.blocks("validation", 16, keep_tail=True)
    assert (len(tokens) - 1) % 16 != 0  # a short last block is there to be got wrong
    inputs, targets = (torch.cat(parts) for parts in zip(*(blocks[i] for i in range(len(blocks))), strict=True))
    assert torch.equal(targets[targets != IGNORED], torch.from_numpy(tokens[1:]))
    assert torch.equal(inputs[targets != IGNORED], torch.from_numpy(tokens[:-1]))
    full = files.blocks("validation", 16, keep_tail=False)
    assert len(full) == len(blocks) - 1 == (len(tokens) - 1) // 16
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_large_vocabularies_get_wider_tokens(texts: Path, tmp_path: Path) -> None:
    files = TokenFiles(find_corpus(str(texts), ["*.txt"], 0, 0.3), 2**16 + 1, tmp_path / "cache")
    files.build()
    dataset: BlockDataset = files.blocks("train", 8, keep_tail=False)
    assert dataset.tokens.dtype == np.uint32
    assert dataset.tokens[0] == 2**16


def test_entropy_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"aaaabbcd")  # 1/2, 1/4, 1/8, 1/8
    assert order0_bits_per_byte((Piece(path, 0, 8),)) == pytest.approx(1.75, rel=1e-12)
    assert bits_per_byte(10 * math.log(2), 4) == pytest.approx(2.5, rel=1e-12)


# -------------------------------------------------------------------------------------------- validation, to the last


def _validate(arguments: list[str]) -> tuple[float, int]:
    settings = load_settings("llm", arguments)
    config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
    chosen = settings.data
    corpus = find_corpus(chosen.path, list(chosen.patterns), chosen.max_bytes, chosen.validation_ratio)
    files = TokenFiles(corpus, config.vocab_size, chosen.cache_dir)
    torch.manual_seed(5)
    model = LanguageModel(settings, config, files).double()
    data = TextData(settings, make_plan(settings, config), files)
    runner: pl.Trainer = trainer(precision="64-true", callbacks=default_callbacks())
    (result,) = runner.validate(model, data, verbose=False)
    return result["val_bits_per_byte"], len(data.validation)


@ranks(1, 2, 3, init=False)
def test_bits_per_byte_are_those_of_one_process(texts: Path, tmp_path: Path, world_size: int) -> None:
    size = 19  # tokens in a block
    sizes = (f"model.block_size={size}", "trainer.batch_size=4", "trainer.devices=1")
    got, num_blocks = _validate(_arguments(texts, tmp_path, *sizes))
    assert num_blocks % 4  # a short last batch
    assert world_size == 1 or num_blocks % world_size  # padding would repeat a block
    assert world_size == 1 or -(-num_blocks // 4) % world_size  # some ranks get a batch less

    files = TokenFiles(find_corpus(str(texts), ["*.txt"], 4_000_000, 0.3), TINY["vocab_size"], tmp_path / "cache")
    torch.manual_seed(5)
    model = Transformer(_tiny()).double()
    tokens = torch.from_numpy(np.fromfile(files.folder / "validation.bin", np.uint16).astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, size):
            part = tokens[begin : begin + size + 1]
            nats -= F.log_softmax(model(part[None, :-1])[0], -1).gather(1, part[1:, None]).sum().item()
    num_bytes = sum(piece.path.stat().st_size for piece in files.corpus.validation)
    assert got == pytest.approx(nats / num_bytes / math.log(2), rel=1e-10)


REAL = (  # a slice of the standard library, and few tokens, so that an untrained model has nothing from its tokenizer
    "data.path=null",
    "data.max_bytes=300_000",
    "data.validation_ratio=0.05",
    "tokenizer.vocab_size=320",
    "model.block_size=64",
    "model.dim=64",
    "model.hidden_dim=160",
)


def test_a_short_run_on_real_text_beats_the_entropy_of_its_bytes(texts: Path, tmp_path: Path) -> None:
    settings = [*_arguments(texts, tmp_path), *REAL]
    short = (
        "trainer.batch_size=16",
        "trainer.max_steps=100",
        "trainer.validate_every=100",
        "optimizer.warmup_steps=10",
    )
    finished = _run(*settings, *short, "trainer.progress_bar=false", "optimizer.learning_rate=5e-3")
    assert finished.returncode == 0, finished.stderr
    rows = ("validation", "without context", "untrained")
    found = re.search(r"\n".join(rf"  {row} +([\d.]+) bits per byte.*" for row in rows), finished.stdout)
    assert found is not None, finished.stdout
    trained, order0, uniform = map(float, found.groups())

    frequencies = Counter(
        b"".join(piece.path.read_bytes() for piece in find_corpus(None, [], 300_000, 0.05).validation)
    )
    total = frequencies.total()
    assert order0 == pytest.approx(-sum(n / total * math.log2(n / total) for n in frequencies.values()), abs=1e-4)
    assert trained < 0.9 * order0
    untrained, _ = _validate(settings)
    assert untrained > order0
    assert untrained == pytest.approx(uniform, rel=0.01)


# ------------------------------------------------------------------------------------------------- plan and dry run


@pytest.mark.parametrize("config", [None, "a100_8x", "a100_multinode"])
def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path, config: str | None) -> None:
    variant = [f"config={config}"] if config else []
    finished = _run(*variant, "dry_run=true", f"output_dir={tmp_path / 'out'}", f"data.cache_dir={tmp_path / 'cache'}")
    assert finished.returncode == 0, finished.stderr
    assert not list(tmp_path.iterdir())
    sizes = {  # layers, width, query and key width, hidden, vocabulary
        None: (4, 192, 64, 512, 2048),
        "a100_8x": (12, 768, 256, 2432, 50304),
        "a100_multinode": (24, 1024, 256, 3200, 50304),
    }
    layers, dim, kv_dim, hidden, vocab = sizes[config]
    num = layers * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * hidden + 2 * dim) + vocab * dim + dim
    assert f"{num:,} parameters" in finished.stdout
    expected = {
        None: ["16 per process x 2 processes x 1 accumulated = 32 samples = 4,096 tokens", "0.002 at"],
        "a100_8x": ["32 per process x 8 processes x 2 accumulated = 512 samples = 524,288 tokens", "0.0006 at"],
        "a100_multinode": [
            "8 per process x 32 processes x 2 accumulated = 512 samples = 1,048,576 tokens",
            f"{3e-4 * math.sqrt(2):g} at",
        ],
    }
    for line in expected[config]:
        assert line in finished.stdout
    if config:  # weights and gradients in fp32, two moments, bf16 copies, gradients inside the buckets
        assert f"gradients {num * 4 / 2**20:,.1f} MiB, optimizer {num * 8 / 2**20:,.1f} MiB" in finished.stdout
        assert f"autocast copies {num * 2 / 2**20:,.1f} MiB" in finished.stdout


def test_the_plan_shows_what_a_global_batch_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    import llm

    llm.main(["trainer.global_batch_size=128", "dry_run=true"])
    assert "16 per process x 2 processes x 4 accumulated = 128 samples = 16,384 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.max_steps=10", "trainer.validate_every=3"], "multiple of trainer.validate_every"),
        (["model.num_heads=5"], "multiple of model.num_kv_heads"),
        (["trainer.precision=bf17"], "trainer.precision to be one of"),
        (["trainer.devices=0"], "at least 1"),
        (["strategy.comm_hook=bf17"], "bf16"),
        (["strategy.nccl.min_ctas=4", "strategy.nccl.max_ctas=2"], "min_ctas"),
        (["data.path=/nowhere/at/all"], "does not exist"),
        (["resume=/nowhere/last.ckpt"], "resume= to name a checkpoint"),
        (["resume=true"], "Write resume=auto"),
        (["checkpoint.every_steps=0"], "checkpoint.every_steps to be at least 1"),
        (["checkpoint.every_minutes=-1.0"], "checkpoint.every_minutes to be at least"),
        (["checkpoint.keep=0"], "checkpoint.keep to be at least 1"),
        (["data.path=3"], "int"),
        ([f"resume={__file__}"], "Expected a checkpoint of Lightning's in"),
        (["trainer.batch_size=0"], "trainer.batch_size to be at least 1"),
        (["trainer.accumulate=0"], "trainer.accumulate to be at least 1"),
        (["trainer.validate_every=0"], "trainer.validate_every to be at least 1"),
        (["trainer.max_steps=-1"], "trainer.max_steps to be at least 1"),
        (["trainer.peak_flops_per_s=fast"], "trainer.peak_flops_per_s to be a number, at least 1"),
        (["trainer.peak_flops_per_s=0"], "trainer.peak_flops_per_s to be at least 1"),
        (["trainer.global_batch_size=12"], "a multiple of 4 per process x 2 processes"),
        (["trainer.global_batch_size=16", "trainer.accumulate=2"], "trainer.accumulate=1 beside"),
        (["optimizer.learning_rate=-1.0"], "optimizer.learning_rate to be at least 0"),
        (["optimizer.base_batch_size=0"], "optimizer.base_batch_size to be at least 1"),
        (["optimizer.betas=[0.9, 1.5]"], "beta"),
        (["optimizer.betas=[0.9]"], "unpack"),
        (["seed=-1"], "seed to be between 0 and 4294967295"),
        (["modle.dim=3"], "Did you mean 'model'?"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    arguments: list[str], message: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llm

    def started(*_: Any, **__: Any) -> None:
        pytest.fail("a Trainer was made")

    monkeypatch.setattr(llm, "make_trainer", started)
    with pytest.raises(SettingsError, match=re.escape(message)):
        llm.main([*_arguments(texts, tmp_path), *arguments])


# -------------------------------------------------------------------------------------------------------- end to end


def test_two_processes_learn_match_plain_torch_and_resume(texts: Path, tmp_path: Path) -> None:
    settings = [
        *_arguments(texts, tmp_path, "trainer.accumulate=2", "trainer.validate_every=20", "trainer.max_steps=40"),
        "trainer.progress_bar=false",
        # With accumulation a static graph reduces its very first micro-batch by itself, which rounds once more.
        "strategy.static_graph=false",
    ]
    first = _run(*settings)
    assert first.returncode == 0, first.stderr
    logs = tmp_path / "out" / "logs"
    losses, measured = (_logged(logs / "version_0" / "metrics.csv", c) for c in ("train_loss", "val_bits_per_byte"))
    assert losses[0] == pytest.approx(math.log(TINY["vocab_size"]), rel=0.02)  # guessing
    assert sum(losses[s] for s in range(35, 40)) / 5 < losses[0] - 0.5
    assert measured[39] < measured[19]
    assert f"{measured[39]:.4f} bits per byte" in first.stdout
    assert "tokens/s" in first.stdout
    assert "A sample\ndef" in first.stdout
    assert first.stdout.count("The plan") == 1  # one process speaks

    # Bit for bit.
    assert [losses[step] for step in range(20)] == _twin_losses(tmp_path, accumulate=2, schedule_steps=40)

    newest = tmp_path / "out" / "checkpoints" / "step=40.ckpt"
    refused = _run(*settings, f"resume={newest}")
    assert refused.returncode == 1
    assert "Raise trainer.max_steps" in refused.stderr
    assert "Traceback" not in refused.stderr

    before = newest.read_bytes()
    finished = _run(*settings, "resume=auto")
    assert finished.returncode == 0, finished.stderr
    assert "The run is finished: its newest checkpoint is that of its last step, 40." in finished.stdout
    assert f"{measured[39]:.4f} bits per byte" in finished.stdout
    assert newest.read_bytes() == before

    other = _run(*settings, "resume=auto", "trainer.max_steps=60", "model.dim=32", "seed=3")
    assert other.returncode == 1
    assert "seed 1234 there, 3 here; model.dim 24 there, 32 here" in other.stderr
    assert newest.read_bytes() == before

    second = _run(*settings, "trainer.max_steps=60", "resume=auto")
    assert second.returncode == 0, second.stderr
    assert "AutoResume: goes on at step 40 of epoch" in second.stderr
    newest_log = max(logs.iterdir(), key=lambda path: int(path.name.removeprefix("version_")))
    resumed = _logged(newest_log / "metrics.csv", "train_loss")
    assert sorted(resumed) == list(range(40, 60))  # it goes on where it ended
    assert max(resumed.values()) < losses[0] - 0.5  # with what it had learnt


def test_the_first_20_losses_with_the_default_strategy(texts: Path, tmp_path: Path) -> None:
    quiet = ("trainer.validate_every=20", "trainer.progress_bar=false", "sample.num_tokens=0")
    finished = _run(*_arguments(texts, tmp_path, "trainer.max_steps=20", *quiet))
    assert finished.returncode == 0, finished.stderr
    losses = _logged(tmp_path / "out" / "logs" / "version_0" / "metrics.csv", "train_loss")
    assert [losses[step] for step in range(20)] == _twin_losses(tmp_path, accumulate=1, schedule_steps=20)


def _twin_losses(tmp_path: Path, accumulate: int, schedule_steps: int) -> list[float]:
    """Returns the first 20 losses of plain torch, the last micro-batch of each step, as the recipe logs them."""
    losses = run_ranks(
        llm_twin.train,
        2,
        token_file=next((tmp_path / "cache").iterdir()) / "train.bin",
        model=TINY,
        seed=1234,
        batch_size=4,
        accumulate=accumulate,
        num_steps=20,
        schedule_steps=schedule_steps,
        learning_rate=2e-3,
        warmup_steps=5,
        final_ratio=0.1,
        weight_decay=0.1,
        clip_norm=1.0,
    )[0]
    return losses[accumulate - 1 :: accumulate]


def test_a_text_without_a_training_step_is_refused(texts: Path, tmp_path: Path) -> None:
    settings = load_settings("llm", _arguments(texts, tmp_path, "trainer.batch_size=4096"))
    files = _files(texts, tmp_path)
    data = TextData(settings, make_plan(settings, _tiny()), files)
    with pytest.raises(SettingsError, match="Expected training text of at least 8192 x 16 tokens"):
        data.setup("fit")


def _facts(texts: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    settings = load_settings("llm", _arguments(texts, tmp_path, *more))
    config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
    return facts_of(settings, make_plan(settings, config), FACTS)


def test_a_checkpoint_of_another_run_is_refused_by_name(texts: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    facts = _facts(texts, tmp_path)
    other = facts | {"model.dim": 3, "seed": 7}
    torch.save({"hyper_parameters": {"run": other}, "global_step": 0}, path)
    settings = load_settings("llm", _arguments(texts, tmp_path, f"resume={path}"))
    with pytest.raises(SettingsError, match=r"Got seed 7 there, 1234 here; model\.dim 3 there, 24 here"):
        checkpoint_to_load(settings, facts, 1, "trainer.max_steps")
    torch.save({"hyper_parameters": {"run": facts}, "global_step": 0}, path)
    assert checkpoint_to_load(settings, facts, 1, "trainer.max_steps") == path
    with pytest.raises(SettingsError, match="one without a run's settings"):
        refuse_other_run({"hyper_parameters": {"model": {}}}, facts)


@pytest.mark.parametrize(
    "change",
    [
        "model.rope_base=9.0",
        "optimizer.learning_rate=1.0e-3",
        "optimizer.betas=[0.9, 0.9]",
        "seed=3",
        "data.max_bytes=9",
        "trainer.precision=64-true",
        "trainer.batch_size=5",
        "trainer.devices=3",
    ],
)
def test_what_changes_a_runs_numbers_is_a_difference(change: str, texts: Path, tmp_path: Path) -> None:
    saved = {"hyper_parameters": {"run": _facts(texts, tmp_path)}}
    name = SAMPLES_PER_STEP if change.startswith(("trainer.batch", "trainer.devices")) else change.partition("=")[0]
    with pytest.raises(SettingsError, match=re.escape(f"Got {name} ")):
        refuse_other_run(saved, _facts(texts, tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [
        ["trainer.devices=4", "trainer.batch_size=2"],
        ["trainer.devices=1", "trainer.global_batch_size=8"],
        ["trainer.devices=1", "trainer.accumulate=2"],
        ["trainer.max_steps=600", "trainer.log_every=3", "data.num_workers=2", "checkpoint.keep=5"],
    ],
)
def test_other_processes_with_steps_of_as_many_samples_are_none(change: list[str], texts: Path, tmp_path: Path) -> None:
    saved = {"hyper_parameters": {"run": _facts(texts, tmp_path)}}
    refuse_other_run(saved, _facts(texts, tmp_path, *change))


def test_another_size_of_the_step_is_refused_with_the_setting_that_keeps_it(texts: Path, tmp_path: Path) -> None:
    saved = {"hyper_parameters": {"run": _facts(texts, tmp_path)}}
    with pytest.raises(SettingsError, match=r"8 there, 12 here.*trainer\.global_batch_size=8 keeps the steps"):
        refuse_other_run(saved, _facts(texts, tmp_path, "trainer.devices=3"))
