"""The pools of a program, by role.

Owns :class:`ResourcePoolManager`: pools made from a specification, roles mapped to them, and the check that all of
them fit on the cluster together. Does not talk to the cluster: who wants the check gives the hosts, or a function
that finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from dask_controller.errors import InsufficientResourcesError, PlacementError
from dask_controller.pool.hosts import HostInfo, SlotsPerHost
from dask_controller.pool.placement import choose_slots
from dask_controller.pool.pool import DaskResourcePool
from dask_controller.pool.settle import choose_together
from dask_controller.pool.shortage import make_error, near_names

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["ResourcePoolManager"]


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    Examples
    --------
    >>> manager = ResourcePoolManager({"train": [2, 2], "rollout": [4]}, {"actor": "train", "rollout": "rollout"})
    >>> manager.create_resource_pool()
    >>> manager.get_resource_pool("actor").store, manager.get_n_gpus()
    ([2, 2], 8)
    """

    #: Pool name to its ranks per node.
    resource_pool_spec: dict[str, list[int]]
    #: Role (a string or an enum member) to the name of its pool.
    mapping: dict[Any, str]
    #: For every pool: how many groups may share a slot.
    max_colocate_count: int = 3
    #: Pools that exist. :meth:`create_resource_pool` fills it and leaves what is there.
    resource_pool_dict: dict[str, DaskResourcePool] = field(default_factory=dict)
    #: These four for every pool, as in :class:`~dask_controller.pool.pool.DaskResourcePool`.
    use_gpu: bool = True
    resource_name: str = "GPU"
    detached: bool = False
    client: Client | None = field(default=None, repr=False)
    #: What the check assumes: ``"one"`` for the inline executor, ``"resource"`` for the process executor.
    slots_per_host: SlotsPerHost = "one"
    #: Called without arguments by :meth:`create_resource_pool`; returns the hosts to check against.
    probe: Callable[[], Sequence[HostInfo]] | None = field(default=None, repr=False)

    def create_resource_pool(self, hosts: Sequence[HostInfo] | None = None) -> None:
        """Make the pools that do not exist yet.

        Parameters
        ----------
        hosts : sequence of HostInfo, optional
            All hosts of the cluster. With them, or with ``probe``, the pools' slots are chosen together at once, so
            that all fit or an error is raised. Without, each pool chooses when its first group is made.

        Raises
        ------
        PlacementError
            A role is mapped to a pool that the specification does not have.
        InsufficientResourcesError
            The pools do not fit together; no pool was made.
        """
        for role, name in self.mapping.items():
            if name not in self.resource_pool_spec and name not in self.resource_pool_dict:
                raise PlacementError(self._unknown_pool(role, name))
        made = {
            name: DaskResourcePool(
                process_on_nodes,
                use_gpu=self.use_gpu,
                name_prefix=name,
                max_colocate_count=self.max_colocate_count,
                detached=self.detached,
                resource_name=self.resource_name,
                client=self.client,
            )
            for name, process_on_nodes in self.resource_pool_spec.items()
            if name not in self.resource_pool_dict
        }
        if hosts is None and self.probe is not None:
            hosts = self.probe()
        filled = [pool for pool in made.values() if pool.world_size]
        if hosts is not None and filled:
            try:
                choose_together(filled, hosts, self.slots_per_host)
            except InsufficientResourcesError as error:
                raise self._do_not_fit(error, {pool.name_prefix: pool.store for pool in filled}) from None
        self.resource_pool_dict.update(made)

    def get_resource_pool(self, role: Hashable) -> DaskResourcePool:
        """The pool of a role.

        Parameters
        ----------
        role : str or enum member
            A key of ``mapping``.

        Returns
        -------
        DaskResourcePool
            The same object for all roles that share it.

        Raises
        ------
        PlacementError
            The role or its pool is unknown, or the pools are not made yet; names the near ones.
        """
        if role not in self.mapping:
            raise PlacementError(self._unknown_role(role))
        name = self.mapping[role]
        if name in self.resource_pool_dict:
            return self.resource_pool_dict[name]
        if name in self.resource_pool_spec:
            raise PlacementError(f"pool {name!r} of role {role!r} is not made yet; call create_resource_pool() first")
        raise PlacementError(self._unknown_pool(role, name))

    def get_n_gpus(self) -> int:
        """Slots of all pools together, whatever they are made of.

        Returns
        -------
        int
            The sum of the specification; with ``use_gpu=False`` that is the number of ranks.
        """
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())

    def check(self, hosts: Sequence[HostInfo]) -> None:
        """Check that all pools fit on the cluster at the same time. Changes nothing.

        Parameters
        ----------
        hosts : sequence of HostInfo
            All hosts of the cluster as they are now. Pools on which groups live already have their slots.

        Raises
        ------
        InsufficientResourcesError
            Names the pools, what is asked, present and free, and who holds the rest.
        """
        live = {claim.pool_id for host in hosts for claim in host.claims}
        waiting = {
            name: list(process_on_nodes)
            for name, process_on_nodes in self.resource_pool_spec.items()
            if name not in self.resource_pool_dict or self.resource_pool_dict[name].pool_id not in live
        }
        try:
            choose_slots(
                hosts,
                [count for process_on_nodes in waiting.values() for count in process_on_nodes],
                pool_id=" + ".join(waiting),
                resource_name=self.resource_name if self.use_gpu else None,
                slots_per_host=self.slots_per_host,
                max_colocate_count=self.max_colocate_count,
            )
        except InsufficientResourcesError as error:
            raise self._do_not_fit(error, waiting) from None

    def _do_not_fit(
        self, error: InsufficientResourcesError, pools: Mapping[str, Sequence[int]]
    ) -> InsufficientResourcesError:
        sizes = ", ".join(f"{name} {list(store)}" for name, store in pools.items())
        return make_error(
            f"The resource pools do not fit on the cluster together ({sizes}). {error.message}",
            error.asked,
            error.present,
            error.free,
            error.held,
            possible=bool(getattr(error, "possible", True)),
        )

    def _unknown_role(self, role: Hashable) -> str:
        name = _role_name(role)
        names = {_role_name(known): known for known in self.mapping}
        # The same name with another type: an enum member where the mapping has strings, or the other way round.
        near = [name] if name in names else near_names(name, list(names))
        hint = f"; did you mean {names[near[0]]!r}?" if near else ""
        roles = ", ".join(map(repr, self.mapping)) or "no roles"
        return f"no pool is mapped to role {role!r}; mapping has {roles}{hint}"

    def _unknown_pool(self, role: Hashable, name: str) -> str:
        near = near_names(str(name), list(self.resource_pool_spec))
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return (
            f"role {role!r} is mapped to pool {name!r}, which resource_pool_spec does not have; it has "
            f"{', '.join(map(repr, self.resource_pool_spec)) or 'no pools'}{hint}"
        )


def _role_name(role: object) -> str:
    return role.name if isinstance(role, Enum) else str(role)
