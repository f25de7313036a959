"""Entries find room whenever there is room."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_controller.pool.packing import assign_entries

quick = settings(deadline=None, max_examples=300)
sizes_and_room = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(0, 7), min_size=1, max_size=4)
)


def brute_force(sizes: list[int], room: list[int], share: bool) -> bool:
    for where in itertools.product(range(len(room)), repeat=len(sizes)):
        if not share and len(set(where)) < len(where):
            continue
        used = [0] * len(room)
        for size, b in zip(sizes, where, strict=True):
            used[b] += size
        if all(u <= r for u, r in zip(used, room, strict=True)):
            return True
    return False


@quick
@given(sizes_and_room, st.booleans())
def test_an_assignment_is_found_exactly_if_there_is_one(case: tuple[list[int], list[int]], share: bool) -> None:
    sizes, room = case
    where = assign_entries(sizes, room, share=share)
    assert (where is not None) == brute_force(sizes, room, share)
    if where is not None:
        used = [0] * len(room)
        for size, b in zip(sizes, where, strict=True):
            used[b] += size
        assert all(u <= r for u, r in zip(used, room, strict=True))
        assert share or len(set(where)) == len(where)


@pytest.mark.parametrize(
    ("sizes", "room", "share", "where"),
    [
        ([2, 2], [2, 2, 2], False, [0, 1]),
        ([1, 2], [2, 1], False, [1, 0]),
        ([1, 2], [2, 2], False, [0, 1]),
        # The tightest bin, so that the large one stays whole for a larger pool.
        ([1], [4, 1], False, [1]),
        # Among the chosen bins the ranks follow the order of the machines.
        ([1, 1], [2, 1], False, [0, 1]),
        ([2, 2, 1], [4, 1], True, [0, 0, 1]),
        # Largest first alone would put 3 with 3 and leave no room for 2, 2, 2.
        ([3, 3, 2, 2, 2], [6, 6], True, [0, 0, 1, 1, 1]),
        ([4, 3, 3, 2], [7, 5], True, [0, 0, 1, 1]),
        ([], [1], False, []),
        ([], [], True, []),
        ([1], [], False, None),
        ([1], [], True, None),
    ],
)
def test_known_cases(sizes: list[int], room: list[int], share: bool, where: list[int] | None) -> None:
    assert assign_entries(sizes, room, share=share) == where


def test_of_equal_bins_the_idle_one_is_taken() -> None:
    assert assign_entries([1], [2, 2], share=False, load=[1, 0]) == [1]


@pytest.mark.parametrize("share", [False, True])
def test_large_uniform_pools_are_quick(share: bool) -> None:
    start = time.perf_counter()
    where = assign_entries([4] * 128, [8] * (64 if share else 128), share=share)
    assert where == [i // 2 if share else i for i in range(128)]
    assert time.perf_counter() - start < 10


def test_a_hopeless_search_ends() -> None:
    # Odd bins and even entries: the totals fit, the entries do not.
    start = time.perf_counter()
    assert assign_entries([2, 4, 6] * 20, [7, 9, 11, 13, 5, 3] * 5, share=True) is None
    assert time.perf_counter() - start < 20
