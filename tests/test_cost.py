"""The closed forms are what the schedules do, textbook mistakes are avoided, and a fit finds the link again."""

import math
import re

import pytest
import torch

from ddp_plugin.collectives.cost import (
    COSTS,
    MEDIA,
    SEEDS,
    Link,
    Measurement,
    cost_of,
    cost_table,
    crossover_bytes,
    fit,
    predict,
    relative_errors,
    render_cost_table,
)
from ddp_plugin.collectives.measuring import measure, measure_gamma_s_per_byte
from ddp_plugin.collectives.schedules import ALGORITHMS, make_schedule
from ddp_plugin.collectives.simulation import critical_path, loads
from tests.harness import ranks, run_ranks

LINK = Link(alpha_s=2e-4, beta_s_per_byte=1e-8, gamma_s_per_byte=1e-10)
WORLD_SIZES = range(1, 18)


def cases(world_size: int) -> list[tuple[str, dict]]:
    return [(name, {}) for name in ALGORITHMS] + [
        ("parameter_server", {"num_servers": num_servers}) for num_servers in range(1, world_size + 1)
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_closed_forms_are_what_the_simulation_counts(world_size: int) -> None:
    for name, options in cases(world_size):
        schedule, formula = make_schedule(name, world_size, **options), cost_of(name, world_size, **options)
        num_elements = 24 * schedule.num_pieces  # pieces of one size, so the formulas are exact
        path, each = critical_path(schedule, num_elements, 4), loads(schedule, num_elements, 4)

        def volume(ratio: float, num_bytes: int = 4 * num_elements) -> float:
            return pytest.approx(ratio * num_bytes, rel=1e-12)  # type: ignore[no-any-return]

        assert path.num_rounds == formula.num_rounds, name
        assert path.num_messages == formula.num_messages, name
        assert max(load.sent_bytes for load in each) == volume(formula.sent_ratio), name
        assert path.full_duplex_bytes == volume(formula.full_duplex_ratio), name
        assert path.half_duplex_bytes == volume(formula.half_duplex_ratio), name
        assert path.shared_bytes == volume(formula.shared_ratio), name
        assert path.added_bytes == volume(formula.added_ratio), name


def test_a_server_on_every_rank_is_two_shots() -> None:
    for n in (2, 5, 8):
        shots, servers = cost_of("two_shot", n), cost_of("parameter_server", n, num_servers=n)
        assert shots.sent_ratio == servers.sent_ratio == cost_of("ring", n).sent_ratio


def test_what_tutorials_get_wrong() -> None:
    previous = 0.0
    for n in (2, 4, 8, 16, 64, 1024):
        ring, tree, butterfly, server = (cost_of(name, n) for name in ("ring", "tree", "butterfly", "parameter_server"))
        depth = int(math.log2(n))
        # Not 2 (n - 1) V: a ring's rank sends less than 2 V whatever n, and only the rounds grow with n.
        assert previous < ring.sent_ratio < 2
        assert ring.num_rounds == 2 * (n - 1)
        # Not 2 log2(n) V: the halves get smaller, so the butterfly sends what the ring sends.
        assert butterfly.sent_ratio == pytest.approx(ring.sent_ratio)
        assert butterfly.num_rounds == tree.num_rounds == 2 * depth
        # That is the tree's critical path, though no rank sends more than half of it.
        assert (tree.full_duplex_ratio, tree.sent_ratio) == (2 * depth, depth)
        assert server.full_duplex_ratio == 2 * (n - 1)
        previous = ring.sent_ratio


def test_seconds_are_latency_bandwidth_and_additions() -> None:
    # Four ranks, ring: 6 messages of a quarter, half of which are added.
    by_hand = 6 * 2e-4 + 6 * 250_000 * 1e-8 + 3 * 250_000 * 1e-10
    assert predict(LINK, "ring", 4, 1_000_000) == pytest.approx(by_hand)
    both_ways = Link(2e-4, 1e-8, 1e-10, medium="half_duplex")
    assert predict(both_ways, "ring", 4, 1_000_000) == pytest.approx(by_hand + 6 * 250_000 * 1e-8)
    assert predict(both_ways, "tree", 4, 1_000_000) == predict(LINK, "tree", 4, 1_000_000)  # one way at a time anyway
    one_bus = Link(2e-4, 1e-8, 1e-10, medium="shared")
    assert predict(one_bus, "ring", 4, 1_000_000) == pytest.approx(by_hand + 3 * 6 * 250_000 * 1e-8)
    assert predict(LINK, "ring", 1, 1_000_000) == 0


def test_crossovers() -> None:
    for n in (4, 6, 8, 64):
        size = crossover_bytes("ring", "tree", n, LINK)
        assert size is not None
        assert predict(LINK, "ring", n, size) == pytest.approx(predict(LINK, "tree", n, size))
        assert predict(LINK, "tree", n, size / 2) < predict(LINK, "ring", n, size / 2)
        assert predict(LINK, "tree", n, size * 2) > predict(LINK, "ring", n, size * 2)
        assert crossover_bytes("tree", "ring", n, LINK) == pytest.approx(size)
    assert crossover_bytes("ring", "butterfly", 8, LINK) is None  # never slower, with a power of two
    assert crossover_bytes("ring", "butterfly", 9, LINK) is not None
    with pytest.raises(ValueError, match="straight line"):
        crossover_bytes("ring", "double_tree", 8, LINK)


def test_the_double_tree_is_cut_into_the_best_number_of_pieces() -> None:
    depth, n, num_bytes = 6, 64, 30_000_000

    def in_pieces(k: int, num_bytes: int) -> float:  # reduction and broadcast, k + 2 h steps each, which carry V / k
        step_s = LINK.alpha_s + num_bytes / k * (LINK.beta_s_per_byte + LINK.gamma_s_per_byte / 2)
        return 2 * (k + 2 * depth) * step_s

    best = min(in_pieces(k, num_bytes) for k in range(1, 2000))
    assert predict(LINK, "double_tree", n, num_bytes) == pytest.approx(best, rel=1e-3)
    assert predict(LINK, "double_tree", n, 1) == pytest.approx(in_pieces(1, 1))  # which cannot be cut
    assert predict(Link(0.0, 1e-8), "double_tree", n, 1e6) == pytest.approx(2e-2)
    assert cost_of("double_tree", n).is_formula_only
    assert not any(cost_of(name, n).is_formula_only for name in COSTS if name != "double_tree")


def test_the_table_is_in_one_unit() -> None:
    rows = render_cost_table(cost_table()).splitlines()
    assert len(rows) == 2 + 10 * len(COSTS) + 1
    assert {len(row) for row in rows[:-1]} == {len(rows[0])}
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows]
    assert ["8", "ring", "14", "14", "1.75 V", "1.75 V", "0.875 V", "14 V"] in cells
    assert sum("double_tree *" in row for row in rows) == 10
    assert "formula only" in rows[-1]
    assert "*" not in render_cost_table([cost_of("ring", 3)])


def made_up(link: Link, names: tuple[str, ...], world_sizes: tuple[int, ...] = (2, 4, 5)) -> list[Measurement]:
    return [
        Measurement(name, n, size, predict(link, name, n, size))
        for name in names
        for n in world_sizes
        for size in (1000, 100_000, 10_000_000)
    ]


@pytest.mark.parametrize("medium", MEDIA)
def test_a_fit_finds_the_link_again(medium: str) -> None:
    link = Link(3e-4, 2e-8, 1e-9, medium)
    found = fit(made_up(link, ("ring", "tree", "parameter_server")), medium=None, gamma_s_per_byte=1e-9)
    assert found.medium == medium
    assert found.alpha_s == pytest.approx(3e-4)
    assert found.beta_s_per_byte == pytest.approx(2e-8)


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    seen = made_up(LINK, ("ring",), (4,))
    found = fit(seen)
    unseen = made_up(LINK, ("butterfly", "tree", "ring"), (2, 8, 16))
    assert max(map(abs, relative_errors(found, unseen))) < 1e-6  # additions are half of the bytes in all of these
    assert found.beta_s_per_byte == pytest.approx(LINK.beta_s_per_byte + LINK.gamma_s_per_byte / 2)


def test_a_fit_is_the_least_sum_of_squares_and_never_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    for offset in (0.0, -0.5):  # the second one would need a negative latency
        measured = [
            Measurement(
                "ring",
                4,
                size,
                (1e-8 * 1.5 * size + offset * 1e-3) * float(1 + 0.1 * torch.rand(1, generator=generator)),
            )
            for size in (100_000, 200_000, 1_000_000, 5_000_000)
        ]
        found = fit(measured)

        def badness(alpha: float, beta: float, rows: list[Measurement] = measured) -> float:
            return sum(error**2 for error in relative_errors(Link(alpha, beta), rows))

        best = badness(found.alpha_s, found.beta_s_per_byte)
        assert found.alpha_s >= 0
        for alpha in (found.alpha_s, found.alpha_s * 1.01 + 1e-7, max(0.0, found.alpha_s * 0.99 - 1e-7)):
            for beta in (found.beta_s_per_byte, found.beta_s_per_byte * 1.01, found.beta_s_per_byte * 0.99):
                assert badness(alpha, beta) >= best * (1 - 1e-9)
    assert found.alpha_s == 0


def test_mistakes_are_refused() -> None:
    for arguments in ((-1.0, 1.0), (1.0, math.inf), (1.0, 1.0, math.nan)):
        with pytest.raises(ValueError, match="of at least 0"):
            Link(*arguments)
    with pytest.raises(ValueError, match="a medium out of"):
        Link(1.0, 1.0, medium="token ring")
    with pytest.raises(ValueError, match="an algorithm out of"):
        cost_of("rign", 4)
    with pytest.raises(ValueError, match="world_size to be an integer of at least 1"):
        cost_of("ring", 0)
    with pytest.raises(ValueError, match="it has none"):
        cost_of("ring", 4, num_servers=1)
    for num_servers in (0, 5):
        with pytest.raises(ValueError, match="from 1 to 4"):
            cost_of("parameter_server", 4, num_servers=num_servers)
    one = Measurement("ring", 2, 100, 1.0)
    for measured in ([one], [one, one], []):
        with pytest.raises(ValueError, match="sizes differ"):
            fit(measured)
    for bad in (Measurement("ring", 2, 9, 0.0), Measurement("double_tree", 2, 9, 1.0), Measurement("ring", 1, 9, 1.0)):
        with pytest.raises(ValueError, match="times above 0"):
            fit([one, bad])
    with pytest.raises(ValueError, match="a medium out of"):
        fit([one, Measurement("ring", 2, 200, 1.5)], medium="air")


def test_seeds_are_of_the_size_that_was_reported() -> None:
    # 256 MB among 4 A100 took 1.8 ms, 256 KB about 30 microseconds.
    assert predict(SEEDS["a100_nvswitch"], "ring", 4, 256e6) == pytest.approx(1.8e-3, rel=0.15)
    assert predict(SEEDS["a100_nvswitch"], "ring", 4, 256e3) == pytest.approx(30e-6, rel=0.15)


def measure_here() -> list[Measurement]:
    return measure([400_003, 4000], algorithms={"ring": {}, "parameter_server": {"num_servers": 2}}, num_repeats=2)


def test_measurements_are_the_same_on_all_ranks_and_can_be_fitted() -> None:
    first, *others = run_ranks(measure_here, 3)
    assert all(other == first for other in others)
    assert [(one.algorithm, one.num_bytes, one.options) for one in first] == [
        ("ring", 400_000, ()),
        ("parameter_server", 400_000, (("num_servers", 2),)),
        ("ring", 4000, ()),
        ("parameter_server", 4000, (("num_servers", 2),)),
    ]
    assert all(one.elapsed_s > 0 and one.world_size == 3 for one in first)
    link = fit(first)
    assert all(math.isfinite(error) and error > -1 for error in relative_errors(link, first))


@ranks(1)
def test_measurements_that_cannot_be_made_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="one repeat or more"):
        measure([100], num_repeats=0)
    with pytest.raises(ValueError, match="at least 4 bytes"):
        measure([3])


def test_adding_takes_time() -> None:
    assert 0 < measure_gamma_s_per_byte(1 << 16) < 1e-6
