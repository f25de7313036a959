"""Facts about hosts, asked of the hosts themselves.

Owns one function that runs on a host (:func:`describe_host`) and the bounded broadcast that carries it. Running it
also installs the host's service, so a probed host can be talked to.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from distributed import Client
from distributed import Worker as DaskWorker

from dask_controller.errors import PlacementError, VersionMismatchError
from dask_controller.pool.devices import parse_mask, visible_devices_variable
from dask_controller.pool.hosts import Claim, HostInfo

__all__ = ["check_versions", "describe_host", "own_versions", "probe_hosts"]


def own_versions() -> dict[str, str]:
    """Versions that controller and hosts must agree on."""
    from importlib.metadata import PackageNotFoundError, version

    out = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("dask-controller", "torch", "tensordict", "numpy"):
        try:
            out[package] = version(package).split("+")[0]
        except PackageNotFoundError:
            out[package] = "not installed"
    return out


def _node_identity() -> str:
    """A string that hosts of one machine share: its name and, where the kernel tells, its boot and network."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            parts.append(stream.read().strip()[:8])
        # Containers and network namespaces on one kernel are nodes of their own: they have their own addresses.
        parts.append(os.readlink("/proc/self/ns/net").strip("net:[]"))
    except OSError:
        pass
    return "/".join(parts)


def _device_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe_host(dask_worker: DaskWorker) -> dict[str, Any]:
    """Runs on a host: who and where it is, what it offers, who sits on it."""
    from dask_controller.runtime.service import ensure_service

    service = ensure_service(dask_worker)
    state = dask_worker.state
    holders = {
        str(ts.key): ", ".join(f"{name}={amount:g}" for name, amount in ts.resource_restrictions.items())
        for ts in list(state.executing) + list(state.long_running)
        if ts.resource_restrictions
    }
    return {
        "name": str(dask_worker.name),
        "node": _node_identity(),
        "pid": os.getpid(),
        "resources": dict(state.total_resources),
        "available": dict(state.available_resources),
        "mask": os.environ.get(visible_devices_variable()),
        "device_count": _device_count(),
        "ranks": [rank.status() for rank in list(service.ranks.values())],
        "leases": {lease.key: lease.pool_id for lease in list(service.leases.values())},
        "holders": holders,
        "versions": own_versions(),
        "memory_limit": dask_worker.memory_manager.memory_limit,
        "lifetime": getattr(dask_worker, "lifetime", None),
    }


def probe_hosts(client: Client, addresses: Sequence[str], timeout_s: float) -> tuple[list[HostInfo], dict[str, Any]]:
    """Ask hosts for their facts, all at once.

    Blocks for ``timeout_s`` at most. Small messages through the scheduler.

    Returns
    -------
    hosts : list of HostInfo
        Hosts that answered.
    raw : dict
        Address to what the host said, or to the exception that it raised.

    Raises
    ------
    PlacementError
        The hosts did not answer in time, or none of them has this package.
    """
    if not addresses:
        return [], {}

    async def describe(dask_worker: DaskWorker) -> dict[str, Any]:
        # Sent by value, for taking it off the wire must not import anything yet: the first import of torch on a host
        # lasts seconds, on a network file system minutes, and would hold up the host's event loop.
        import asyncio
        import importlib

        name = "dask_controller.runtime.probe"
        module = await asyncio.get_running_loop().run_in_executor(None, importlib.import_module, name)
        return module.describe_host(dask_worker)  # type: ignore[no-any-return]

    try:
        raw = client.sync(client._run, describe, workers=list(addresses), on_error="return", callback_timeout=timeout_s)
    except TimeoutError as error:
        raise PlacementError(
            f"the {len(addresses)} hosts of the cluster did not all answer within {timeout_s:g} s: one of them is "
            "stopped or overloaded. Look at the Dask dashboard, or raise controller.probe-timeout (the first import of "
            "torch counts)"
        ) from error
    broken = {address: answer for address, answer in raw.items() if isinstance(answer, BaseException)}
    if broken and len(broken) == len(raw):
        address, first = next(iter(broken.items()))
        hint = (
            "Install dask-controller and what it needs in the environment of the Dask workers"
            if isinstance(first, ImportError)
            else "See the worker's log"
        )
        raise PlacementError(
            f"no host can run dask_controller; {address} said {type(first).__name__}: {first}. {hint}"
        ) from first
    hosts = [_host_info(address, facts) for address, facts in raw.items() if address not in broken]
    return hosts, raw


def _host_info(address: str, facts: dict[str, Any]) -> HostInfo:
    claims = tuple(
        Claim(pool_id=rank["pool_id"], group=rank["group"], rank=rank["rank"], slot=rank["slot"], device=rank["device"])
        for rank in facts["ranks"]
    )
    holders = {key: what for key, what in facts["holders"].items() if key not in facts["leases"]}
    return HostInfo(
        address=address,
        name=facts["name"],
        node=facts["node"],
        pid=facts["pid"],
        resources=facts["resources"],
        available=facts["available"],
        devices=parse_mask(facts["mask"]),
        device_count=facts["device_count"],
        claims=claims,
        holders={f"task {key}": what for key, what in holders.items()},
    )


def check_versions(raw: dict[str, Any], addresses: Sequence[str]) -> None:
    """Refuse hosts whose versions cannot work with the controller's.

    Raises
    ------
    VersionMismatchError
        Names package, both versions and the hosts.
    """
    mine = own_versions()
    problems: dict[tuple[str, str], list[str]] = {}
    for address in addresses:
        facts = raw.get(address)
        if not isinstance(facts, dict):
            continue
        for package, version in facts["versions"].items():
            if _release(version) != _release(mine.get(package, "")):
                problems.setdefault((package, version), []).append(address)
    if problems:
        lines = [
            f"  {package}: {mine.get(package)} here, {version} on {len(where)} host(s) such as {where[0]}"
            for (package, version), where in sorted(problems.items())
        ]
        raise VersionMismatchError(
            "controller and hosts run different versions, and data would not survive the way between them:\n"
            + "\n".join(lines)
            + "\nUse the same environment (image, conda environment) for the controller and the Dask workers"
        )


def _release(version: str) -> tuple[str, ...]:
    # A patch release does not change what travels.
    return tuple(version.split(".")[:2])
