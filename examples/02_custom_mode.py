"""A dispatch mode of your own: deal texts so that every rank gets about the same number of letters.

A mode is two functions. The first turns the arguments of one call into one list element per rank; the second turns the
list of results into what the caller gets.
"""

from __future__ import annotations

from typing import Any

from distributed import Client, LocalCluster

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    Dispatch,
    Worker,
    register,
    register_dispatch_mode,
)


def deal_by_length(group: DaskWorkerGroup, texts: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Longest text first, each to the rank that has the fewest letters so far."""
    hands: list[list[tuple[int, str]]] = [[] for _ in range(group.world_size)]
    for position in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
        lightest = min(hands, key=lambda hand: sum(len(text) for _, text in hand))
        lightest.append((position, texts[position]))
    return [hands], {}  # one argument: a list with one element per rank


def in_given_order(group: DaskWorkerGroup, results: list[list[tuple[int, Any]]]) -> list[Any]:
    """Undo the dealing: each result goes back to the place of its text."""
    return [value for _, value in sorted(pair for hand in results for pair in hand)]


register_dispatch_mode("DEAL_BY_LENGTH", dispatch_fn=deal_by_length, collect_fn=in_given_order)


class Shouter(Worker):
    @register(dispatch_mode=Dispatch["DEAL_BY_LENGTH"])
    def shout(self, hand: list[tuple[int, str]]) -> list[tuple[int, str]]:
        letters = sum(len(text) for _, text in hand)
        return [(position, f"{text.upper()} (rank {self.rank} has {letters} letters)") for position, text in hand]


def main() -> None:
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster):
        with DaskWorkerGroup(DaskResourcePool([2], use_gpu=False), DaskClassWithInitArgs(Shouter)) as group:
            for line in group.shout(["to", "be", "or", "notwithstanding", "not", "to", "be"]):
                print(line)


if __name__ == "__main__":
    main()
