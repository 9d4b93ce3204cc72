"""Every schedule is an all-reduce, for every number of ranks; and the walk on paper is the one done by hand."""

from collections import Counter

import pytest

from ddp_plugin.collectives.schedules import (
    ALGORITHMS,
    Schedule,
    Transfer,
    make_schedule,
    parameter_server,
    piece_bounds,
    rank_rounds,
    ring,
    tree,
)
from ddp_plugin.collectives.simulation import critical_path, loads, owners, snapshots
from ddp_plugin.collectives.walkthrough import render_walk, walk
from tests.schedule_mistakes import mistakes

WORLD_SIZES = range(1, 18)


def every_schedule(world_size: int) -> list[Schedule]:
    simple = [make_schedule(name, world_size) for name in ALGORITHMS]
    return simple + [parameter_server(world_size, num_servers) for num_servers in range(1, world_size + 1)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_ends_with_every_contribution_exactly_once(world_size: int) -> None:
    for schedule in every_schedule(world_size):
        assert schedule.world_size == world_size
        assert mistakes(schedule) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_a_plain_interpreter_of_transfers_gets_the_sum_too(world_size: int) -> None:
    """The simulation is not asked here: multisets instead of counts, and rank by rank."""
    for schedule in every_schedule(world_size):
        held = {(rank, piece): Counter([rank]) for rank in range(world_size) for piece in range(schedule.num_pieces)}
        for transfers in schedule.rounds:
            before = {key: Counter(value) for key, value in held.items()}
            for transfer in transfers:
                for piece in transfer.pieces:
                    arrived = before[transfer.source, piece]
                    own = held[transfer.target, piece] if transfer.action == "add" else Counter()
                    held[transfer.target, piece] = own + arrived
        assert all(value == Counter(range(world_size)) for value in held.values())


def changed(schedule: Schedule, number: int, transfers: tuple[Transfer, ...]) -> Schedule:
    rounds = (*schedule.rounds[:number], transfers, *schedule.rounds[number + 1 :])
    return Schedule(schedule.algorithm, schedule.world_size, schedule.num_pieces, rounds)


def test_mistakes_are_found() -> None:
    good = ring(4)
    first = good.rounds[0]
    lost = changed(good, 0, first[1:])
    assert any("rank 0's part of piece 0 0 times" in mistake for mistake in mistakes(lost))
    twice = changed(good, 0, (*first, Transfer(0, 2, range(1), "add")))
    assert any("2 times" in mistake for mistake in mistakes(twice))
    nowhere = changed(good, 0, (*first, Transfer(2, 2, range(1), "add")))
    assert any("goes nowhere" in mistake for mistake in mistakes(nowhere))
    outside = changed(good, 0, (*first, Transfer(2, 4, range(1), "add")))
    assert any("goes nowhere" in mistake for mistake in mistakes(outside))
    # Rank 1 sends piece 1 in this round: what arrives for it must not come in the middle of that.
    overwriting = changed(good, 3, (*good.rounds[3], Transfer(3, 1, range(1, 3), "copy")))
    assert any("rank 1 overwrites" in mistake for mistake in mistakes(overwriting))
    two_ways = Schedule("x", 3, 1, ((Transfer(0, 2, range(1), "add"), Transfer(1, 2, range(1), "copy")),))
    assert any("in two ways" in mistake for mistake in mistakes(two_ways))
    late = Schedule("x", 2, 1, ((Transfer(0, 1, range(1), "copy"),), (Transfer(1, 0, range(1), "add"),)))
    assert any("begun to copy" in mistake for mistake in mistakes(late))


@pytest.mark.parametrize(
    ("num_elements", "num_pieces", "sizes"),
    [(10, 4, [2, 3, 2, 3]), (12, 4, [3, 3, 3, 3]), (2, 5, [0, 0, 1, 0, 1]), (0, 3, [0, 0, 0]), (1, 1, [1])],
)
def test_pieces_are_even_and_cover_everything(num_elements: int, num_pieces: int, sizes: list[int]) -> None:
    bounds = piece_bounds(num_elements, num_pieces)
    assert [end - start for start, end in zip(bounds, bounds[1:], strict=False)] == sizes
    assert (bounds[0], bounds[-1]) == (0, num_elements)


def test_pieces_differ_by_one_element_at_most() -> None:
    for num_elements in (0, 1, 2, 3, 7, 1000, 100_003):
        for num_pieces in range(1, 18):
            bounds = piece_bounds(num_elements, num_pieces)
            sizes = {end - start for start, end in zip(bounds, bounds[1:], strict=False)}
            assert max(sizes) - min(sizes) <= 1


def test_owners_after_the_reduction() -> None:
    assert owners(ring(4)) == ((3,), (0,), (1,), (2,))  # rotated by one
    for n in range(2, 18):
        assert owners(ring(n)) == tuple(((piece - 1) % n,) for piece in range(n))
    assert owners(tree(6)) == ((0,),)
    assert owners(make_schedule("butterfly", 8)) == tuple((rank,) for rank in range(8))
    assert owners(make_schedule("butterfly", 6)) == ((0,), (2,), (4,), (5,))  # 1 and 3 have handed over
    assert owners(make_schedule("recursive_doubling", 4)) == ((0, 1, 2, 3),)
    assert owners(parameter_server(5, num_servers=3)) == ((0,), (1,), (2,))


def test_a_parameter_server_carries_everything_in_and_out_of_the_master() -> None:
    master, *workers = loads(parameter_server(8), num_elements=100, element_size_bytes=4)
    assert (master.received_bytes, master.sent_bytes) == (7 * 400, 7 * 400)
    assert all((worker.received_bytes, worker.sent_bytes) == (400, 400) for worker in workers)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_is_sent_is_received(world_size: int) -> None:
    for schedule in every_schedule(world_size):
        each = loads(schedule, 1001, 2)
        assert sum(load.sent_bytes for load in each) == sum(load.received_bytes for load in each)
        assert sum(load.num_messages_sent for load in each) == sum(load.num_messages_received for load in each)
        assert critical_path(schedule, 1001, 2).shared_bytes == sum(load.sent_bytes for load in each)
        # Nobody can have everything without receiving the n - 1 other parts of it in some form, at least once.
        assert all(load.received_bytes >= 0.99 * 2002 * (world_size - 1) / world_size for load in each)


def test_no_message_for_an_empty_piece() -> None:
    assert loads(ring(4), 0, 4) == loads(ring(1), 9, 4) * 4
    assert sum(load.num_messages_sent for load in loads(ring(4), 1, 4)) == 6  # one piece, 3 hops in each phase


def test_a_rank_sees_only_its_own_transfers() -> None:
    schedule = tree(3)
    assert [len(seen.sends) + len(seen.receives) for seen in rank_rounds(schedule, 1)] == [1, 1]
    assert rank_rounds(schedule, 0)[0].receives == (Transfer(1, 0, range(1), "add"),)


def test_schedules_are_made_once() -> None:
    assert make_schedule("parameter_server", 4, num_servers=2) is make_schedule("parameter_server", 4, num_servers=2)
    assert make_schedule("ring", 4) is not make_schedule("ring", 5)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("rign", 4), {}, "Expected an algorithm out of .*'ring'.*Got 'rign'"),
        (("ring", 0), {}, "world_size to be an integer of at least 1"),
        (("ring", True), {}, "world_size to be an integer of at least 1"),
        (("ring", 4), {"num_servers": 1}, "it has none"),
        (("parameter_server", 4), {"servers": 1}, "num_servers"),
        (("parameter_server", 4), {"num_servers": 0}, "from 1 to 4"),
        (("parameter_server", 4), {"num_servers": 5}, "from 1 to 4"),
        (("parameter_server", 4), {"num_servers": True}, "from 1 to 4"),
        (("parameter_server", 4), {"num_servers": [1]}, "from 1 to 4"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple, options: dict, words: str) -> None:
    make_schedule("parameter_server", 4, num_servers=1)  # 1 and True are one key of a dictionary, but not one option
    with pytest.raises(ValueError, match=words):
        make_schedule(*arguments, **options)


# Done by hand: in round t of each phase rank r passes one chunk on to rank r + 1. The cells that change are those which
# just received.
BY_HAND = (
    ("a0 a1 a2 a3", "b0 b1 b2 b3", "c0 c1 c2 c3", "d0 d1 d2 d3"),
    # 0 -> 1: chunk 0; 1 -> 2: chunk 1; 2 -> 3: chunk 2; 3 -> 0: chunk 3
    ("a0 a1 a2 a3+d3", "a0+b0 b1 b2 b3", "c0 b1+c1 c2 c3", "d0 d1 c2+d2 d3"),
    # 0 -> 1: chunk 3; 1 -> 2: chunk 0; 2 -> 3: chunk 1; 3 -> 0: chunk 2
    ("a0 a1 a2+c2+d2 a3+d3", "a0+b0 b1 b2 a3+b3+d3", "a0+b0+c0 b1+c1 c2 c3", "d0 b1+c1+d1 c2+d2 d3"),
    # 0 -> 1: chunk 2; 1 -> 2: chunk 3; 2 -> 3: chunk 0; 3 -> 0: chunk 1
    ("a0 Σ1 a2+c2+d2 a3+d3", "a0+b0 b1 Σ2 a3+b3+d3", "a0+b0+c0 b1+c1 c2 Σ3", "Σ0 b1+c1+d1 c2+d2 d3"),
    # 0 -> 1: chunk 1; 1 -> 2: chunk 2; 2 -> 3: chunk 3; 3 -> 0: chunk 0
    ("Σ0 Σ1 a2+c2+d2 a3+d3", "a0+b0 Σ1 Σ2 a3+b3+d3", "a0+b0+c0 b1+c1 Σ2 Σ3", "Σ0 b1+c1+d1 c2+d2 Σ3"),
    # 0 -> 1: chunk 0; 1 -> 2: chunk 1; 2 -> 3: chunk 2; 3 -> 0: chunk 3
    ("Σ0 Σ1 a2+c2+d2 Σ3", "Σ0 Σ1 Σ2 a3+b3+d3", "a0+b0+c0 Σ1 Σ2 Σ3", "Σ0 b1+c1+d1 Σ2 Σ3"),
    # 0 -> 1: chunk 3; 1 -> 2: chunk 0; 2 -> 3: chunk 1; 3 -> 0: chunk 2
    ("Σ0 Σ1 Σ2 Σ3", "Σ0 Σ1 Σ2 Σ3", "Σ0 Σ1 Σ2 Σ3", "Σ0 Σ1 Σ2 Σ3"),
)


def test_the_ring_of_four_is_the_one_done_by_hand() -> None:
    walked = walk(4)
    assert tuple(tuple(map(" ".join, step.table)) for step in walked.rounds) == BY_HAND
    assert [step.phase for step in walked.rounds] == ["start"] + ["reduce"] * 3 + ["distribute"] * 3
    assert walked.owners == ((3,), (0,), (1,), (2,))
    # A quarter of the message from each rank in each round.
    assert all(len(step.transfers) == 4 for step in walked.rounds[1:])
    assert all(len(transfer.pieces) == 1 for step in walked.rounds for transfer in step.transfers)
    assert walked.schedule.num_pieces == 4


def test_a_walk_in_print() -> None:
    assert (
        render_walk(walk(2))
        == """\
ring all-reduce, 2 ranks, message V in 2 chunks of V/2, 1 + 1 rounds

start
         | chunk 0 | chunk 1
  rank 0 | a0      | a1
  rank 1 | b0      | b1

round 1 of 2, reduce
  rank 0 sends chunk 0 to rank 1, which adds it
  rank 1 sends chunk 1 to rank 0, which adds it
         | chunk 0 | chunk 1
  rank 0 | a0      | Σ1
  rank 1 | Σ0      | b1

complete after the reduction: Σ0 at rank 1, Σ1 at rank 0

round 2 of 2, distribute
  rank 0 sends chunk 1 to rank 1, which copies it
  rank 1 sends chunk 0 to rank 0, which copies it
         | chunk 0 | chunk 1
  rank 0 | Σ0      | Σ1
  rank 1 | Σ0      | Σ1
"""
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 3, 4, 30])
def test_any_algorithm_and_any_number_of_ranks_can_be_walked_through(algorithm: str, world_size: int) -> None:
    walked = walk(world_size, algorithm)
    text = render_walk(walked)
    assert len(walked.rounds) == 1 + len(walked.schedule.rounds)
    assert text.count("\nround ") == len(walked.schedule.rounds)
    assert ("r29.0" in text) == (world_size == 30)  # where the alphabet ends
    if world_size > 1:
        assert all(cell == f"Σ{chunk}" for row in walked.rounds[-1].table for chunk, cell in enumerate(row))
    assert len(snapshots(walked.schedule)) == len(walked.rounds)
