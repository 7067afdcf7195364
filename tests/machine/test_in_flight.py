"""Transfers that are under way together: which of them meet on the same bytes."""

import pytest

from lowering.emulation.in_flight import End, InFlight, Start

FIRST, SECOND = Start("", 1), Start("", 2)


def end(*pieces, space="vmem"):
    return End.of(space, space, pieces)


def rows(first, count, *, width=4, stride=8):
    """Pieces of a window of a row-major array."""
    return end(*((row * stride, width) for row in range(first, first + count)))


@pytest.mark.parametrize(
    ("one", "other", "shared_bytes"),
    [
        (end((0, 8)), end((6, 8)), 64),
        (end((0, 8)), end((8, 8)), 0),
        (end((0, 8)), end((2, 3)), 96),
        (end((0, 8)), end((0, 8), space="hbm"), 0),
        (end((0, 8)), end((0, 0)), 0),
        (end((0, 1), space="smem"), end((7, 1), space="smem"), 4),  # addresses of words
        (end((0, 4), (0, 4)), end((2, 4), (3, 4)), 64),  # what one of them reads twice counts once
        (rows(0, 4), rows(2, 4), 256),
        # Halves of the same rows reach over one another, and share nothing.
        (rows(0, 4), end(*((row * 8 + 4, 4) for row in range(4))), 0),
    ],
)
def test_shared_bytes_are_those_of_both_sets_of_addresses(one, other, shared_bytes):
    assert one.shares(other) == other.shares(one) == shared_bytes


def met(*jobs):
    """Starts transfers, and waits for amounts, of semaphores; returns what has met."""
    flying, held, number = InFlight(), {}, 0
    for kind, semaphore, *more in jobs:
        if kind == "start":
            place, *ends = more
            flying.start(number, place, semaphore, 4, ends)
            held[semaphore] = held.get(semaphore, 0) + 4
            number += 1
        elif kind == "wait":
            flying.wait(semaphore, held[semaphore], *more)
            held[semaphore] -= more[0]
        else:
            flying.clear(semaphore)
    return flying.meetings


LOAD = "start", 1, FIRST, end((0, 4), space="hbm"), end((0, 4))
OVER = "start", 2, SECOND, end((4, 4), space="hbm"), end((2, 4))
STORE = "start", 2, SECOND, end((2, 4)), end((8, 4), space="hbm")


@pytest.mark.parametrize(
    ("jobs", "does"),
    [
        ((LOAD, OVER), (True, True)),
        ((LOAD, STORE), (True, False)),
        ((STORE, LOAD), (False, True)),
        ((STORE, STORE), (True, True)),  # to the same place; what both read does not count
        ((LOAD, ("wait", 1, 4), OVER), None),
        ((LOAD, ("clear", 1), OVER), None),
        ((LOAD, ("start", 2, SECOND, end((0, 4), space="hbm"), end((8, 4)))), None),  # both read the same
    ],
)
def test_transfers_meet_where_one_of_them_writes_before_the_wait_for_the_other(jobs, does):
    found = met(*jobs)
    assert [(one.first_writes, one.second_writes) for one in found] == ([] if does is None else [does])


def test_transfers_on_one_semaphore_complete_in_the_order_of_their_starts():
    elsewhere = "start", 1, FIRST, end((0, 4), space="hbm"), end((20, 4))
    assert met(LOAD, elsewhere, ("wait", 1, 4), OVER) == ()
    assert len(met(elsewhere, LOAD, ("wait", 1, 4), OVER)) == 1
    assert met(elsewhere, LOAD, ("wait", 1, 8), OVER) == ()  # one wait may be for both
    assert met(elsewhere, LOAD, ("wait", 1, 4), ("wait", 1, 4), OVER) == ()


def test_pairs_of_the_same_places_are_one_meeting():
    (found,) = met(LOAD, LOAD, LOAD)
    assert (found.early, found.late) == ({0}, {1, 2})  # each of the others is the later one of a pair
    assert found.said("0x1", "0x1", "result 0 depends") == (
        "bundle 0x1 starts a transfer, and before the wait for it starts another: both write the same 128 bytes of "
        "vmem, and result 0 depends on which comes first"
    )
