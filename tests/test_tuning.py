"""The choice among measured candidates: by hand-made times whose answer is known, and the record that is written."""

import statistics
from itertools import product

import pytest
from omegaconf import OmegaConf

from ddp_plugin import CustomDDPStrategy, NcclOptions, StrategyConfig, Tuning
from ddp_plugin.tuning.choice import Candidate, Row, Spread, candidates, fastest, is_faster, slowest


def test_quartiles_by_hand() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([4.0, 1.0]) == Spread(1.75, 2.5, 3.25)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_slowest_rank_counts() -> None:
    assert slowest([1.0, 3.0, 2.0]) == 3.0


def test_a_clear_winner_is_faster() -> None:
    assert is_faster([0.8, 0.82, 0.79, 0.81, 0.8])


def test_one_bad_round_among_seven_does_not_hide_it() -> None:
    assert is_faster([0.8, 0.82, 3.0, 0.81, 0.8, 0.83, 0.8])


@pytest.mark.parametrize(
    ("what", "ratios"),
    [
        ("a tie", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("slower", [1.1, 1.2, 1.1, 1.3, 1.2]),
        ("a smaller median within the noise", [0.9, 0.7, 1.3, 0.95, 1.2]),
        ("too few rounds", [0.5, 0.5]),
        ("nothing", []),
    ],
)
def test_what_is_not_faster(what: str, ratios: list[float]) -> None:
    assert not is_faster(ratios), what


def test_equal_candidates_seldom_look_faster() -> None:
    """All outcomes of seven fair coins: a candidate that is equal to the default wins 8 of 128 times, twice in a row
    once in 256."""
    wins = [is_faster([0.9 if below else 1.1 for below in flips]) for flips in product([False, True], repeat=7)]
    assert (sum(wins), len(wins)) == (8, 128)


def test_the_fastest_of_those_that_are_faster() -> None:
    ratios = {
        1: [0.9, 0.91, 0.9],  # faster
        2: [0.5, 0.4, 1.6],  # a smaller median, and noise
        3: [0.8, 0.81, 0.8],  # the fastest
        4: [],  # failed
    }
    assert fastest(ratios) == 3
    assert fastest({2: ratios[2], 4: ratios[4]}) is None
    assert fastest({}) is None


def test_candidates_are_all_combinations_with_the_given_settings_first() -> None:
    base = StrategyConfig(bucket_cap_mb=25.0)
    found = candidates(base, {"comm_hook": ["bf16"], "bucket_cap_mb": [None, 25.0, 1.0], "static_graph": []})
    assert [candidate.name for candidate in found] == [
        "default",
        "bucket_cap_mb=None",
        "bucket_cap_mb=1",
        "comm_hook=bf16",
        "comm_hook=bf16, bucket_cap_mb=None",
        "comm_hook=bf16, bucket_cap_mb=1",
    ]
    assert found[0].settings == {"comm_hook": None, "bucket_cap_mb": 25.0}  # 25 was there already
    assert found[5].settings == {"comm_hook": "bf16", "bucket_cap_mb": 1.0}


def test_options_of_a_hook_are_in_the_name() -> None:
    found = candidates(StrategyConfig(), {"comm_hook": [{"name": "powersgd", "matrix_rank": 4}]})
    assert found[1].name == "comm_hook=powersgd(matrix_rank=4)"


def test_a_bucket_size_takes_the_place_of_a_list_of_sizes() -> None:
    found = candidates(StrategyConfig(bucket_cap_mb_list=[1, 25]), {"bucket_cap_mb": [None, 5.0]})
    assert [candidate.settings for candidate in found] == [
        {"bucket_cap_mb": None},
        {"bucket_cap_mb": 5.0, "bucket_cap_mb_list": None},
    ]


def tuning_with(config: StrategyConfig, chosen: Candidate, *rows: Row) -> Tuning:
    return Tuning(config, chosen, "Chosen: it was faster.", rows, (0.5, 0.6, 0.5), 20, 2, ("a machine",))


DEFAULT = Candidate({"bucket_cap_mb": None, "comm_hook": None}, "default")
SMALL = Candidate({"bucket_cap_mb": 5.0, "comm_hook": "bf16"}, "bucket_cap_mb=5, comm_hook=bf16", "changes the numbers")
BROKEN = Candidate({"bucket_cap_mb": 1.0, "comm_hook": None}, "bucket_cap_mb=1")
ROWS = (
    Row(DEFAULT, (0.010, 0.012, 0.011), (1.0, 1.0, 1.0)),
    Row(SMALL, (0.005, 0.006, 0.011), (0.5, 0.5, 1.0)),
    Row(BROKEN, failure="TypeError: no such thing"),
)


def test_the_table_shows_median_quartiles_and_verdict_of_each() -> None:
    header, columns, default, small, broken, reason = str(tuning_with(StrategyConfig(), SMALL, *ROWS)).splitlines()
    assert "2 processes, 3 rounds of 20 steps" in header
    assert columns.split()[0] == "candidate"
    median_ms = statistics.median([5.0, 6.0, 11.0])
    assert f"{median_ms:.2f}  " in small
    assert "5.50 to 8.50" in small  # by hand: half way between neighbours
    assert "0.500" in small
    assert "0.500 to 0.750" in small
    assert small.endswith("faster; changes the numbers")
    assert default.split()[:2] == ["default", "11.00"]
    assert broken.endswith("left out: TypeError: no such thing")
    assert reason == "Chosen: it was faster."


def test_the_verdict_is_the_rules() -> None:
    assert Row(BROKEN, (1.0, 1.0, 1.0), (1.0, 1.1, 0.9)).verdict == "not faster"
    assert Row(Candidate({}, "noop", may_win=False), (1.0,) * 3, (0.1, 0.1, 0.1)).verdict == "for comparison only"


def test_yaml_holds_what_competed_and_what_was_given() -> None:
    given = StrategyConfig(find_unused_parameters=True, start_method="fork", nccl=NcclOptions(max_ctas=8))
    kept = Tuning(given, DEFAULT, "kept")
    assert OmegaConf.to_container(OmegaConf.create(kept.to_yaml())) == {
        "bucket_cap_mb": None,  # competed, and its default was chosen: that is said
        "comm_hook": None,
        "find_unused_parameters": True,
        "start_method": "fork",
        "nccl": {name: 8 if name == "max_ctas" else None for name in vars(NcclOptions())},
    }
    assert kept.to_yaml().startswith("# Written by ddp_plugin.tune().\n# kept\n")
    assert list(OmegaConf.create(kept.to_yaml("strategy"))) == ["strategy"]


def test_the_strategy_reads_its_own_yaml() -> None:
    config = StrategyConfig(bucket_cap_mb=5.0, comm_hook={"name": "bf16"})
    failed = Row(BROKEN, failure="two lines\ntimeout_s: -1")  # what was said does not become settings
    text = tuning_with(config, SMALL, ROWS[0], failed).to_yaml()
    strategy = CustomDDPStrategy.from_config(OmegaConf.create(text))
    assert strategy.comm_hook is not None
    assert strategy.comm_hook.name == "bf16"
