"""Which accelerator a rank uses, out of those that its host may see.

Owns the reading of visible-devices masks, the assignment of physical devices to the slots of one machine, and
:func:`get_device`, the only place that turns an ordinal into a ``torch.device``. A host's mask is read and never
rewritten: an ordinal always counts inside the mask that the host already has. Does not own which hosts a pool uses
(:mod:`.placement`), and starts no accelerator: torch is imported only when :func:`get_device` is called.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from dask_controller.errors import PlacementError
from dask_controller.pool.hosts import HostInfo, slot_count

if TYPE_CHECKING:
    import torch

__all__ = [
    "VISIBLE_DEVICES_VARIABLES",
    "assign_device",
    "assign_devices",
    "get_device",
    "parse_mask",
    "visible_devices_variable",
]

#: Backend name to the environment variable that says which of its devices a process may see.
VISIBLE_DEVICES_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "cuda": "CUDA_VISIBLE_DEVICES",
        "hip": "HIP_VISIBLE_DEVICES",
        "npu": "ASCEND_RT_VISIBLE_DEVICES",
        "xpu": "ZE_AFFINITY_MASK",
    }
)

#: What container runtimes and users write for "no device at all".
_NOTHING = frozenset({"none", "void", "nodevfiles"})


def visible_devices_variable(backend: str = "cuda") -> str:
    """Name of the environment variable that masks the devices of a backend.

    Parameters
    ----------
    backend : str
        ``"cuda"``, ``"hip"``, ``"npu"`` or ``"xpu"``.

    Returns
    -------
    str
        The name of the variable; nothing is read from the environment.

    Raises
    ------
    ValueError
        The backend is unknown; the message names the known ones.

    Examples
    --------
    >>> visible_devices_variable()
    'CUDA_VISIBLE_DEVICES'
    """
    try:
        return VISIBLE_DEVICES_VARIABLES[backend]
    except KeyError:
        near = difflib.get_close_matches(str(backend).lower(), VISIBLE_DEVICES_VARIABLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown accelerator backend {backend!r}, expected one of {', '.join(VISIBLE_DEVICES_VARIABLES)}{hint}"
        ) from None


def parse_mask(value: str | None) -> tuple[str, ...] | None:
    """Entries of a visible-devices mask.

    Parameters
    ----------
    value : str or None
        The value of the variable, or None where it is not set.

    Returns
    -------
    tuple of str or None
        The entries in order. None where there is no mask (every device is visible), ``()`` where the mask hides
        every device.

    Notes
    -----
    Like the CUDA runtime, reading stops at the first entry that names no device (an empty one, or a negative
    number): the devices behind it are hidden too. ``GPU-<uuid>`` and ``MIG-<uuid>`` are kept as they are.

    Examples
    --------
    >>> parse_mask("3, 0")
    ('3', '0')
    >>> parse_mask("0,-1,2")
    ('0',)
    >>> parse_mask("")
    ()
    """
    if value is None:
        return None
    if value.strip().lower() in _NOTHING:
        return ()
    entries: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    return tuple(entries)


def visible_devices(host: HostInfo) -> tuple[str, ...]:
    """Physical devices that a host sees, in the order of its ordinals.

    Parameters
    ----------
    host : HostInfo
        The host.

    Returns
    -------
    tuple of str
        Element ``i`` identifies the device with ordinal ``i``. Numbers lose leading zeros; other ids are opaque.
    """
    if host.devices is None:
        return tuple(str(i) for i in range(host.device_count))
    entries = tuple(str(int(e)) if e.isascii() and e.isdecimal() else e for e in host.devices)
    # Where torch sees fewer devices than the mask names, the tail is not real. Where it sees none we cannot tell a
    # build without accelerator support from a host that was not asked, and the mask is the better witness.
    return entries[: host.device_count] if host.device_count else entries


def assign_devices(hosts: Sequence[HostInfo], resource_name: str | None = None) -> dict[tuple[str, int], int | None]:
    """Give every slot of one machine a device, so that no two slots share one if that can be avoided.

    Parameters
    ----------
    hosts : sequence of HostInfo
        Every host of the machine, also those that no pool uses, in the machine's order.
    resource_name : str or None
        The resource whose declared amount is a host's number of slots. None gives each host one slot.

    Returns
    -------
    dict
        ``(address, slot index)`` to the ordinal inside that host's own mask, or None for a host without devices.

    Notes
    -----
    A slot takes the first device of its host's mask that is still free; where none is, earlier slots move to other
    devices of theirs if that frees one (augmenting paths: Kuhn, "The Hungarian method", 1955). Devices that claims
    already name stay where they are. Only when a machine declares more slots than its hosts see devices do slots
    share, the least used device first. The slot counts do not depend on the executor, so pools that run inline and
    pools that run in child processes agree. Pools on one machine that use different resource names do not see each
    other here, except through the devices that live claims name.
    """
    seats = [(host, index) for host in hosts for index in range(slot_count(host, resource_name))]
    return _assign(seats, hosts)


def assign_device(
    hosts: Sequence[HostInfo], host: HostInfo, slot_index: int, resource_name: str | None = None
) -> int | None:
    """Ordinal of the device that one slot of a host uses.

    Parameters
    ----------
    hosts : sequence of HostInfo
        Every host of the machine, in the machine's order, ``host`` among them.
    host : HostInfo
        The host of the slot.
    slot_index : int
        Number of the slot on this host.
    resource_name : str or None
        See :func:`assign_devices`.

    Returns
    -------
    int or None
        Ordinal inside the host's own mask; None without a device.
    """
    seats = [(other, index) for other in hosts for index in range(slot_count(other, resource_name))]
    seats += [(host, index) for index in range(slot_count(host, resource_name), slot_index + 1)]
    return _assign(seats, hosts)[host.address, slot_index]


def _assign(seats: Sequence[tuple[HostInfo, int]], hosts: Sequence[HostInfo]) -> dict[tuple[str, int], int | None]:
    sees = {host.address: visible_devices(host) for host in hosts}
    fixed = {
        (host.address, claim.slot): sees[host.address][claim.device]
        for host in hosts
        for claim in host.claims
        if claim.device is not None and 0 <= claim.device < len(sees[host.address])
    }
    uses: dict[tuple[str, int], str] = {}
    holder: dict[str, tuple[str, int]] = {}

    def move(seat: tuple[str, int], tried: set[str]) -> bool:
        devices = sees[seat[0]]
        for device in devices:
            if device not in holder and device not in in_use:
                uses[seat], holder[device] = device, seat
                return True
        for device in devices:
            if device in holder and device not in tried:
                tried.add(device)
                if move(holder[device], tried):
                    uses[seat], holder[device] = device, seat
                    return True
        return False

    in_use = set(fixed.values())
    count = dict.fromkeys(in_use, 1)
    left: list[tuple[str, int]] = []
    for host, index in seats:
        seat = (host.address, index)
        if seat in fixed:
            uses[seat] = fixed[seat]
        elif sees[host.address] and not move(seat, set()):
            left.append(seat)
    for device in holder:
        count[device] = count.get(device, 0) + 1
    for seat in left:
        device = min(sees[seat[0]], key=lambda d: count.get(d, 0))
        uses[seat] = device
        count[device] = count.get(device, 0) + 1
    return {
        (host.address, index): (
            sees[host.address].index(uses[host.address, index]) if (host.address, index) in uses else None
        )
        for host, index in seats
    }


def get_device(ordinal: int | None) -> torch.device:
    """The device that a rank computes on.

    Parameters
    ----------
    ordinal : int or None
        Ordinal inside the process's own visible-devices mask, as in ``Slot.device``; None for the CPU.

    Returns
    -------
    torch.device
        ``cuda:<ordinal>`` where an ordinal is given and torch can use CUDA (which covers ROCm builds), else ``cpu``.
        The current device of the process is left as it is.

    Raises
    ------
    PlacementError
        torch can use CUDA, but sees no device with that ordinal.
    """
    import torch

    if ordinal is None or not torch.cuda.is_available():
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if not 0 <= ordinal < seen:
        variable = visible_devices_variable("cuda")
        raise PlacementError(
            f"the rank should use device {ordinal} of its process, but torch sees {seen} device(s) there. Did "
            f"{variable} change after the Dask worker started? Set it before the worker starts and leave it alone after"
        )
    return torch.device("cuda", ordinal)
