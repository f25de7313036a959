"""Hosts made of plain values, and ranks that sit down on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_controller.pool.hosts import Claim, HostInfo, Slot


def make_host(
    number: int,
    node: str = "node-a",
    *,
    gpu: float = 1.0,
    available: float | None = None,
    resources: Mapping[str, float] | None = None,
    pid: int | None = None,
    **fields: Any,
) -> HostInfo:
    """Host ``number`` of a machine; alone in its process, all of its resources free."""
    declared = dict(resources) if resources is not None else ({"GPU": gpu} if gpu else {})
    free = {name: amount if available is None else available for name, amount in declared.items()}
    return HostInfo(
        address=fields.pop("address", f"tcp://{node}:{number}"),
        name=fields.pop("name", f"{node}-{number}"),
        node=node,
        pid=1000 + number if pid is None else pid,
        resources=declared,
        available=free,
        **fields,
    )


def make_machine(count: int, node: str = "node-a", **fields: Any) -> list[HostInfo]:
    return [make_host(i, node, **fields) for i in range(count)]


def occupy(
    hosts: Sequence[HostInfo],
    slots: Sequence[Slot],
    group: str,
    *,
    resource_name: str | None = "GPU",
    executor: str = "inline",
) -> list[HostInfo]:
    """The hosts once a group lives on the slots: claims, and one lease for each slot that nobody of its pool held."""
    out = []
    for host in hosts:
        mine = [(rank, slot) for rank, slot in enumerate(slots) if slot.address == host.address]
        held = {(claim.pool_id, claim.slot) for claim in host.claims}
        new = {(slot.pool_id, slot.index) for _, slot in mine} - held
        available = Counter(host.available)
        if resource_name is not None:
            available[resource_name] -= len(new)
        claims = tuple(Claim(s.pool_id, group, rank, s.index, executor, s.device) for rank, s in mine)
        out.append(replace(host, claims=host.claims + claims, available=dict(available)))
    return out


def addresses(slots: Sequence[Slot]) -> list[str]:
    return [slot.address for slot in slots]
