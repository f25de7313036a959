"""The base class of user code.

Owns what a :class:`Worker` offers to the methods written on it: its rank and sizes, the rendezvous address, the
mesh positions it has registered, its colocated siblings. Does not own how it is built or called.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from dask_controller.dispatch.modes import Dispatch, Execute
from dask_controller.dispatch.register import register
from dask_controller.pool.devices import get_device, visible_devices_variable
from dask_controller.worker.context import RankContext, current_context, protected_variables

__all__ = ["Worker"]

_T = TypeVar("_T")


class Worker:
    """Base class for the code of a rank.

    A subclass marks the methods that the controller may call with :func:`~dask_controller.register`. When it is
    built by a group, its rank, sizes and rendezvous address are there before its own ``__init__`` runs, also if that
    never calls ``super().__init__()``, so ``torch.distributed.init_process_group()`` works anywhere in it. Built
    without a group, it reads ``RANK``, ``WORLD_SIZE`` and kin from the environment. A Worker built inside a method of
    another Worker has the same rank.

    Examples
    --------
    >>> from dask_controller import Dispatch, Worker, register
    >>> class Greeter(Worker):
    ...     @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    ...     def greet(self, name):
    ...         return f"{name} from rank {self.rank} of {self.world_size}"
    """

    fused_worker_attr_name = "fused_worker_dict"

    _context: RankContext | None
    #: Role to worker, for every role that shares this process with this one.
    fused_worker_dict: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Here rather than in __init__, which a subclass may override without calling super().
        self = super().__new__(cls)
        self._context = current_context()
        self.fused_worker_dict = {}
        return self

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        # ``cuda_visible_devices`` is what get_cuda_visible_devices() answers where the environment does not say it.
        self._cuda_visible_devices = cuda_visible_devices
        self.context  # noqa: B018  - without a group, say at once which variable is missing

    @property
    def context(self) -> RankContext:
        """Everything this rank knows of itself."""
        context = self.__dict__.get("_context")
        if context is None:
            context = self._context = RankContext.from_environment()
        return context

    @property
    def rank(self) -> int:
        """Rank in ``[0, world_size)``."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self.context.world_size

    @property
    def local_rank(self) -> int:
        """Rank among the ranks on the same node of the pool."""
        return self.context.local_rank

    @property
    def local_world_size(self) -> int:
        """Ranks on the same node of the pool."""
        return self.context.local_world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank: its own accelerator where the host has one, else the CPU."""
        return get_device(self.context.device)

    # ------------------------------------------------------------------ rendezvous

    @classmethod
    def env_keys(cls) -> list[str]:
        """Names of the variables that the group sets, and that ``worker_env`` may not override."""
        return protected_variables()

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port of rank 0 for ``torch.distributed``, as strings."""
        return self.context.master_addr, str(self.context.master_port)

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """An address of this node and a port that is free on it now, as strings.

        The port is not held: it is yours as soon as you bind it, and somebody else's if you wait.
        """
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return self._node_ip(), str(port)

    def _node_ip(self) -> str:
        address = self.context.host
        if "://" in address and not address.startswith("inproc"):
            return address.split("://", 1)[1].rsplit(":", 1)[0].strip("[]")
        return self.context.master_addr if self.context.world_size == 1 else "127.0.0.1"

    def get_cuda_visible_devices(self) -> str:
        """The visible-devices variable of this process, or ``"not set"``. Empty where it hides every device."""
        given = self.__dict__.get("_cuda_visible_devices")
        # An empty mask is a mask: it must not read like none.
        return os.environ.get(visible_devices_variable(), "not set" if given is None else given)

    # ------------------------------------------------------------------ meshes

    def _mesh(self, kind: str) -> dict[str, Any]:
        # Made on first use because __init__ may not have run.
        return self.__dict__.setdefault("_mesh_info", {"dispatch": {}, "collect": {}})[kind]  # type: ignore[no-any-return]

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say where this rank stands in a mesh.

        Parameters
        ----------
        mesh_name : str
            Name of the mesh, as given to ``make_nd_compute_dataproto_dispatch_fn``.
        dp_rank : int
            Which chunk of a batch this rank receives. Ranks that share it receive the same rows.
        is_collect : bool
            Whether this rank's results are part of the collected batch.

        Raises
        ------
        ValueError
            The mesh is registered already.
        """
        if mesh_name in self._mesh("dispatch"):
            raise ValueError(
                f"mesh {mesh_name!r} is registered already on rank {self.rank} with dp_rank "
                f"{self._mesh('dispatch')[mesh_name]}; give the second mesh its own name"
            )
        self._mesh("dispatch")[mesh_name] = int(dp_rank)
        self._mesh("collect")[mesh_name] = bool(is_collect)

    def _registered(self, kind: str, mesh_name: str) -> Any:
        table = self._mesh(kind)
        if mesh_name not in table:
            raise ValueError(
                f"mesh {mesh_name!r} is not registered on rank {self.rank} of {type(self).__name__}; registered: "
                f"{sorted(table) or 'none'}. Call self._register_dispatch_collect_info({mesh_name!r}, dp_rank, "
                "is_collect) in __init__"
            )
        return table[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """This rank's dp_rank in ``mesh_name``."""
        return int(self._registered("dispatch", mesh_name))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's results are collected in ``mesh_name``."""
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's results are collected in ``mesh_name``."""
        return bool(self._registered("collect", mesh_name))

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Every registered mesh: ``{"dispatch_dp_rank": {mesh: dp_rank}, "collect_dp_rank": {mesh: is_collect}}``."""
        return {"dispatch_dp_rank": dict(self._mesh("dispatch")), "collect_dp_rank": dict(self._mesh("collect"))}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Register ``mesh_name`` here with the position that another worker has in a mesh of its own.

        Parameters
        ----------
        mesh_name : str
            Name to register here.
        dispatch_dp_rank, collect_dp_rank : mapping
            What the other worker's :meth:`get_dispatch_collect` gave. If it has several meshes, one of them must be
            called ``mesh_name``.
        """
        name = mesh_name if mesh_name in dispatch_dp_rank else None
        if name is None and len(dispatch_dp_rank) == 1:
            name = next(iter(dispatch_dp_rank))
        if name is None or name not in collect_dp_rank:
            raise ValueError(
                f"cannot tell which of the meshes {sorted(dispatch_dp_rank)} to copy as {mesh_name!r}: pass the one "
                "that is meant"
            )
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank[name], collect_dp_rank[name])

    # ------------------------------------------------------------------ functions sent by the controller

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Run a function of the controller on this rank, as ``func(self, *args, **kwargs)``."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Run a function of the controller on rank 0, as ``func(*args, **kwargs)``."""
        return func(*args, **kwargs)

    # ------------------------------------------------------------------ colocation

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of role ``worker_name`` in this process, or None."""
        return self.fused_worker_dict.get(worker_name)
