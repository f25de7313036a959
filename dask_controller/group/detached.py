"""Groups that outlive their controller.

Owns how such a group is remembered: its actor and lease futures are published on the scheduler under the group's
name, with a record of how to talk to it. Published futures are Dask's own way to keep keys alive without a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import cloudpickle
from distributed import Client

from dask_controller.errors import PlacementError, RankLostError
from dask_controller.group.start import Members, attach, shut_down
from dask_controller.runtime.clients import current_client

__all__ = ["attach_detached", "destroy_detached", "find_detached", "list_detached", "publish"]

_PREFIX = "dask-controller-group/"


def publish(members: Members, cls: type, worker_names: list[str]) -> None:
    """Make the group outlive this client.

    Raises
    ------
    PlacementError
        A detached group of that name exists.
    """
    engine = members.engine
    record = {
        "name": engine.name,
        "group_id": engine.group_id,
        "slots": [asdict(slot) for slot in members.slots],
        "master_addr": members.master_addr,
        "master_port": members.master_port,
        "worker_names": worker_names,
        "cls": cloudpickle.dumps(cls),
    }
    data = [members.actors, members.leases, record]
    try:
        engine.client.publish_dataset(data, name=_PREFIX + engine.name)
    except KeyError as error:
        raise PlacementError(
            f"a detached group {engine.name!r} exists already: attach to it with DaskWorkerGroup.from_detached, or "
            "destroy it with dask_controller.destroy_detached"
        ) from error


def list_detached(client: Client | None = None) -> list[str]:
    """Names of the detached groups on the cluster of ``client``, by default the current one."""
    client = client or current_client()
    return sorted(name[len(_PREFIX) :] for name in client.list_datasets() if str(name).startswith(_PREFIX))


def find_detached(client: Client, worker_names: list[str]) -> str:
    """Name of the detached group whose ranks are called ``worker_names``."""
    for name in list_detached(client):
        record = client.get_dataset(_PREFIX + name)[2]
        if list(record["worker_names"]) == list(worker_names):
            return name
    raise PlacementError(
        f"no detached group has the ranks {worker_names}; there are the groups {list_detached(client) or 'none'}"
    )


def attach_detached(client: Client, name: str) -> tuple[Members, Mapping[str, Any]]:
    """Talk to the detached group ``name``.

    Raises
    ------
    PlacementError
        No such group.
    RankLostError
        One of its hosts is gone.
    """
    try:
        actors, leases, record = client.get_dataset(_PREFIX + name)
    except KeyError as error:
        raise PlacementError(
            f"there is no detached group {name!r}; there are {list_detached(client) or 'none'}"
        ) from error
    return attach(client, record, actors, leases), record


def destroy_detached(name: str, client: Client | None = None, wait_s: float = 10.0) -> None:
    """End a detached group, whoever made it. Blocks until its ranks have ended, ``wait_s`` seconds at most.

    Parameters
    ----------
    name : str
        Name of the group.
    client : distributed.Client, optional
        Default: the current one.
    wait_s : float
        Seconds to wait for ranks that run a call.

    Raises
    ------
    PlacementError
        No such group.
    """
    client = client or current_client()
    try:
        members, _ = attach_detached(client, name)
    except RankLostError:
        # Some ranks are gone already; forgetting the futures ends the others.
        client.unpublish_dataset(_PREFIX + name)
        return
    client.unpublish_dataset(_PREFIX + name)
    shut_down(members, wait_s=wait_s)
