"""Plain facts about hosts, and the one order in which they are used.

Owns the value types that placement works on (:class:`HostInfo`, :class:`Claim`, :class:`Slot`) and the order of
machines and of hosts inside a machine. Does not own how the facts are gathered (``runtime/probe.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Claim", "HostInfo", "NaturalKey", "Slot", "SlotsPerHost", "hosts_by_node", "natural_key", "slot_count"]

#: ``"one"``: a host carries one rank (inline executor). ``"resource"``: as many ranks as it declares of the resource
#: (process executor).
SlotsPerHost: TypeAlias = Literal["one", "resource"]

#: See :func:`natural_key`.
NaturalKey: TypeAlias = tuple[tuple[tuple[int, int, str], ...], str]

#: Resources are floats; what is a rounding error short of a whole slot is a slot.
_EPSILON = 1e-6


@dataclass(frozen=True)
class Claim:
    """A rank of a live group sits on a slot."""

    #: Id of the pool that the slot belongs to.
    pool_id: str
    #: Name of the group.
    group: str
    #: The rank inside that group.
    rank: int
    #: Number of the slot on its host.
    slot: int
    #: ``"inline"`` or ``"process"``.
    executor: str = "inline"
    #: Ordinal, inside the host's mask, of the device in use; None where unknown or none. Keeps later choices off it.
    device: int | None = None


@dataclass(frozen=True)
class HostInfo:
    """What placement needs to know of a host (a Dask worker process)."""

    #: Dask address, unique in the cluster.
    address: str
    #: Dask name.
    name: str
    #: Identity of the machine; equal for hosts of one machine.
    node: str
    #: Process id on that machine; hosts may share a process.
    pid: int
    #: Declared totals, such as ``{"GPU": 1.0}``.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: What running tasks and leases have not taken of them.
    available: Mapping[str, float] = field(default_factory=dict)
    #: Entries of the host's own visible-devices mask; None where none is set, ``()`` where it hides everything.
    devices: tuple[str, ...] | None = None
    #: Accelerators that torch sees there; 0 where there are none or nobody looked.
    device_count: int = 0
    #: Ranks of live groups on this host.
    claims: tuple[Claim, ...] = ()
    #: Who else holds resources of this host, such as ``{"task train-123": "GPU=1"}``.
    holders: Mapping[str, str] = field(default_factory=dict)

    @property
    def process(self) -> tuple[str, int]:
        """Identity of the operating system process."""
        return self.node, self.pid


@dataclass(frozen=True)
class Slot:
    """One place for a rank on a host."""

    #: Dask address of the host.
    address: str
    #: Identity of its machine.
    node: str
    #: Id of the pool that holds the slot. The parts of a split pool share it; a merged pool has several.
    pool_id: str
    #: Index of the entry in ``process_on_nodes``.
    node_rank: int
    #: Index inside that entry.
    local_rank: int
    #: Size of that entry.
    local_world_size: int
    #: Number of the slot on its host; 0 unless several ranks share a host.
    index: int = 0
    #: Ordinal, inside the host's own mask, of the device to use; None without accelerator.
    device: int | None = None


def whole_slots(amount: float) -> int:
    """Slots that an amount of a resource makes.

    Parameters
    ----------
    amount : float
        Declared or available amount.

    Returns
    -------
    int
        The amount rounded down, never negative.
    """
    return max(int(amount + _EPSILON), 0)


def slot_count(host: HostInfo, resource_name: str | None) -> int:
    """Slots that a host declares.

    Parameters
    ----------
    host : HostInfo
        The host.
    resource_name : str or None
        The resource that makes slots; None makes one slot of every host.

    Returns
    -------
    int
        The number of slots, whatever is free of them.
    """
    return 1 if resource_name is None else whole_slots(host.resources.get(resource_name, 0.0))


def natural_key(text: str) -> NaturalKey:
    """Sort key that puts ``"node2"`` before ``"node10"``.

    Parameters
    ----------
    text : str
        A name or address.

    Returns
    -------
    tuple
        Equal only for equal texts.

    Examples
    --------
    >>> sorted(["node10", "node2", "node"], key=natural_key)
    ['node', 'node2', 'node10']
    """
    parts = (part for part in re.split(r"([0-9]+)", text) if part)
    return tuple((0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts), text


def hosts_by_node(hosts: Iterable[HostInfo]) -> dict[str, list[HostInfo]]:
    """Hosts in the order in which ranks are placed, whatever the order they come in.

    Parameters
    ----------
    hosts : iterable of HostInfo
        Hosts with different addresses.

    Returns
    -------
    dict of str to list of HostInfo
        Machines by natural order of their identity; the hosts of a machine by the first device of their mask (where
        it is a number; the others come after), then name, then address, in natural order.
    """
    out: dict[str, list[HostInfo]] = {}
    for host in sorted(hosts, key=_host_key):
        out.setdefault(host.node, []).append(host)
    return out


def _host_key(host: HostInfo) -> tuple[NaturalKey, tuple[int, int], NaturalKey, NaturalKey]:
    first = host.devices[0] if host.devices else ""
    device = (0, int(first)) if first.isdecimal() and first.isascii() else (1, 0)
    return natural_key(host.node), device, natural_key(host.name), natural_key(host.address)
