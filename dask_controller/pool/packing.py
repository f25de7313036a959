"""Fitting the entries of a pool into machines: arithmetic on integers.

Owns :func:`assign_entries`. Knows neither hosts nor pools.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign_entries"]

#: States that the exact search may look at, first for any answer, then for the nicest one. Uniform pools need as many
#: as they have entries; the bound is for sizes that are hard to pack on machines that are nearly full.
_SEARCH_LIMIT = 50_000
_POLISH_LIMIT = 20_000


def assign_entries(
    sizes: Sequence[int], capacities: Sequence[int], *, share: bool, load: Sequence[int] | None = None
) -> list[int] | None:
    """Put every entry into a bin that has room for it.

    Parameters
    ----------
    sizes : sequence of int
        Sizes of the entries, each at least 1.
    capacities : sequence of int
        Room in each bin; bins come in the order of preference.
    share : bool
        False gives every entry a bin of its own, True lets several entries share one.
    load : sequence of int, optional
        How busy each bin is; of two bins that fit equally well the less busy one is taken.

    Returns
    -------
    list of int or None
        The bin of each entry, in the order of the entries; None where there is no such assignment.

    Notes
    -----
    With bins of their own, entries are placed largest first into the tightest bin, which finds an assignment whenever
    there is one: whatever fits a larger entry fits a smaller one. Sharing is bin packing and is searched depth first,
    largest entry first, tightest bin first, with the rule that an entry that fills a bin exactly may stay there
    (whatever else an arrangement puts into that bin can change places with the entry). The search is exact up to a
    bound of 50,000 states; a pool beyond that counts as not placeable. Bins are then taken in order as far as the
    entries allow, so that the ranks of a pool follow the order of the machines.

    Examples
    --------
    >>> assign_entries([1, 2], [2, 1], share=False)
    [1, 0]
    >>> assign_entries([2, 2], [4, 1], share=True)
    [0, 0]
    """
    if share:
        return _shared(sizes, capacities)
    return _distinct(sizes, capacities, load or [0] * len(capacities))


def _distinct(sizes: Sequence[int], capacities: Sequence[int], load: Sequence[int]) -> list[int] | None:
    free = set(range(len(capacities)))
    chosen: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [b for b in free if capacities[b] >= size]
        if not fits:
            return None
        best = min(fits, key=lambda b: (capacities[b], load[b], b))
        free.remove(best)
        chosen.append(best)
    chosen.sort()
    out: list[int] = []
    for i, size in enumerate(sizes):
        rest = sorted(sizes[i + 1 :], reverse=True)
        for b in chosen:
            if capacities[b] < size:
                continue
            room = sorted((capacities[other] for other in chosen if other != b), reverse=True)
            if all(cap >= need for cap, need in zip(room, rest, strict=True)):
                out.append(b)
                chosen.remove(b)
                break
    return out


def _shared(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    found = _search([sizes[i] for i in order], capacities, [_SEARCH_LIMIT])
    if found is None:
        return None
    budget = [_POLISH_LIMIT]
    room = list(capacities)
    out: list[int] = []
    for i, size in enumerate(sizes):
        rest = sorted(sizes[i + 1 :], reverse=True)
        for b, cap in enumerate(room):
            if cap < size:
                continue
            room[b] -= size
            if _search(rest, room, budget) is not None:
                out.append(b)
                break
            room[b] += size
        else:
            # Only the bound can bring us here; the first answer is right, if less tidy.
            return [b for _, b in sorted(zip(order, found, strict=True))]
    return out


def _search(sizes: Sequence[int], capacities: Sequence[int], budget: list[int]) -> list[int] | None:
    """Bins for entries that come largest first, or None. Takes what it uses from ``budget[0]``."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    stack: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), tuple(capacities))]
    while stack:
        bins, room = stack.pop()
        i = len(bins)
        while i < len(sizes) and sizes[i] in room:
            b = room.index(sizes[i])
            bins, room = (*bins, b), (*room[:b], 0, *room[b + 1 :])
            i += 1
        if i == len(sizes):
            return list(bins)
        state = (i, tuple(sorted(room)))
        if state in seen:
            continue
        seen.add(state)
        budget[0] -= 1
        if budget[0] < 0:
            return None
        if sum(cap for cap in room if cap >= sizes[-1]) < sum(sizes[i:]):
            continue
        for cap in sorted({cap for cap in room if cap > sizes[i]}, reverse=True):
            b = room.index(cap)
            stack.append(((*bins, b), (*room[:b], cap - sizes[i], *room[b + 1 :])))
    return None
