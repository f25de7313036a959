"""The handle the user holds: :class:`DaskWorkerGroup`.

Owns the public face of a group: its methods (bound from the marked methods of the rank's class), the ways to call
ranks without a mark, roles of a colocated class, detaching, closing. Does not own how ranks come to be
(:mod:`.start`) or how calls travel (:mod:`.engine`).
"""

from __future__ import annotations

import inspect
import logging
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import cloudpickle
from distributed import Client, Future

from dask_controller.config import get_seconds
from dask_controller.dispatch._batches import call_padding
from dask_controller.dispatch.functions import collect_all_to_all
from dask_controller.errors import DispatchError, GroupClosedError, PlacementError, RegistrationError
from dask_controller.group import detached as detached_groups
from dask_controller.group.bind import BoundMethod, bind_class, missing_method
from dask_controller.group.class_args import ClassWithInitArgs, DaskClassWithInitArgs
from dask_controller.group.colocate import is_forwarder, role_classes
from dask_controller.group.health import AlivenessCheck
from dask_controller.group.rank_handle import RankHandle
from dask_controller.group.start import Members, check_worker_env, shut_down, start_group
from dask_controller.pool.pool import DaskResourcePool, ResourcePool
from dask_controller.protocol.batching import RankOutputs
from dask_controller.runtime.channel import call_host
from dask_controller.runtime.clients import current_client

__all__ = ["DaskWorkerGroup", "WorkerGroup"]

logger = logging.getLogger(__name__)


class WorkerGroup:
    """What dispatch functions see of a group: its size and where its ranks stand in meshes.

    Parameters
    ----------
    resource_pool : ResourcePool or None
        Where the ranks are, or None for ranks that exist already.
    """

    def __init__(self, resource_pool: ResourcePool | None = None) -> None:
        self.resource_pool = resource_pool
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        if self.resource_pool is None:
            raise PlacementError("this WorkerGroup has no resource pool and so no size")
        return self.resource_pool.world_size


class _Life:
    """Shared by a group and its role views; when the last of them is dropped, the ranks end."""

    def __init__(self, members: Members, detached: bool) -> None:
        self.members = members
        self.detached = detached
        self.finalizer = weakref.finalize(self, shut_down, members, 0.0, not detached)
        # At exit the client closes and takes the actors along.
        self.finalizer.atexit = False


class DaskWorkerGroup(WorkerGroup):
    """Ranks on the hosts of a Dask cluster, driven as one object.

    Every method of the rank's class that :func:`~dask_controller.register` marks is a method here: called once by the
    controller, it runs on the ranks, its arguments split and its results joined as the mark says.

    Parameters
    ----------
    resource_pool : DaskResourcePool, optional
        Where the ranks go. Not needed to attach to ranks that exist.
    dask_cls_with_init : DaskClassWithInitArgs, optional
        Class of the ranks and its arguments.
    bin_pack : bool, default True
        Accepted for compatibility; ranks of one pool entry always share a node.
    name_prefix : str, optional
        Name of the group; generated if None. Detached groups are found by it.
    detached : bool, default False
        The ranks outlive this program; see :meth:`from_detached` and :func:`~dask_controller.destroy_detached`. Also if
        the pool is detached.
    worker_names, worker_handles : sequence, optional
        Attach to the detached group with these rank names or handles instead of making ranks.
    worker_env : mapping of str to str, optional
        Environment variables for the ranks. May not contain those of :meth:`Worker.env_keys`.
    master_addr, master_port : optional
        Rendezvous for ``torch.distributed``; by default rank 0's address and a port that is held for the group.
    client : distributed.Client, optional
        Default: the pool's, else the current one. The group never closes it, and never starts a cluster.
    start_timeout_s, placement_timeout_s : float, optional
        Limits for the whole start and for waiting for slots, in seconds; default from dask's configuration.

    Raises
    ------
    RegistrationError
        The class cannot be driven by a group: names collide, a mode is unknown, a mark makes no sense.
    InsufficientResourcesError
        Fewer slots than ranks; says what was asked, is present, and who holds it.
    GroupStartTimeoutError
        The ranks were not up in time.
    RankFailedError
        ``__init__`` raised on a rank. Everything is undone.
    VersionMismatchError
        Controller and hosts run different versions.

    Notes
    -----
    Blocks until ``__init__`` has returned on every rank; all ranks run it at the same time, so it may call
    ``torch.distributed.init_process_group()``. Calls run on every rank in the order in which this program issues them.
    Ctrl-C during a blocking call returns to the prompt at once; the call goes on, the group stays usable, and its next
    call runs after it.

    Examples
    --------
    >>> from distributed import Client
    >>> from dask_controller import DaskClassWithInitArgs, DaskResourcePool, DaskWorkerGroup
    >>> client = Client(n_workers=2, threads_per_worker=1)  # doctest: +SKIP
    >>> pool = DaskResourcePool([2], use_gpu=False)  # doctest: +SKIP
    >>> with DaskWorkerGroup(pool, DaskClassWithInitArgs(Greeter)) as group:  # doctest: +SKIP
    ...     group.greet("hello")
    ['hello from rank 0 of 2', 'hello from rank 1 of 2']
    """

    def __init__(
        self,
        resource_pool: DaskResourcePool | None = None,
        dask_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankHandle] | None = None,
        worker_env: Mapping[str, str] | None = None,
        master_addr: str | None = None,
        master_port: int | str | None = None,
        *,
        client: Client | None = None,
        start_timeout_s: float | None = None,
        placement_timeout_s: float | None = None,
    ) -> None:
        if not isinstance(bin_pack, bool) or not isinstance(detached, bool):
            raise RegistrationError("bin_pack and detached are True or False")
        client = _resolve_client(client, resource_pool)
        if worker_names is not None or worker_handles is not None:
            names = list(worker_names or [handle.name for handle in worker_handles or ()])
            members, record = detached_groups.attach_detached(client, detached_groups.find_detached(client, names))
            cls = dask_cls_with_init.cls if dask_cls_with_init is not None else cloudpickle.loads(record["cls"])
            self._set_up(resource_pool, _Life(members, True), cls, list(record["worker_names"]), None)
            return
        if resource_pool is None or dask_cls_with_init is None:
            raise RegistrationError(
                "DaskWorkerGroup needs a DaskResourcePool and a DaskClassWithInitArgs, or the worker_names of a "
                "detached group"
            )
        if not isinstance(resource_pool, DaskResourcePool):
            raise RegistrationError(f"resource_pool must be a DaskResourcePool, got {type(resource_pool).__name__}")
        if not isinstance(dask_cls_with_init, ClassWithInitArgs):
            raise RegistrationError(
                f"the class must be wrapped: DaskClassWithInitArgs(MyWorker, ...); got {dask_cls_with_init!r}"
            )
        if resource_pool.world_size < 1:
            raise PlacementError("the resource pool is empty: give it process_on_nodes, such as [2]")
        cia = _dask_cia(dask_cls_with_init)
        _check_class(cia.cls)
        detached = detached or resource_pool.detached
        name = name_prefix or f"{cia.cls.__name__}-{uuid.uuid4().hex[:6]}"
        environment = check_worker_env(worker_env)
        if detached and name in detached_groups.list_detached(client):
            raise PlacementError(
                f"a detached group {name!r} exists already: attach to it with DaskWorkerGroup.from_detached, or "
                "destroy it with dask_controller.destroy_detached"
            )
        members = start_group(
            client,
            resource_pool,
            cia,
            name=name,
            worker_env=environment,
            master_addr=master_addr,
            master_port=None if master_port is None else int(master_port),
            timeout_s=_seconds(start_timeout_s, "start-timeout"),
            placement_timeout_s=_seconds(placement_timeout_s, "placement-timeout"),
        )
        names = [f"{name}_{cia.cls.__name__}_{slot.node_rank}:{slot.local_rank}" for slot in members.slots]
        if detached:
            try:
                detached_groups.publish(members, cia.cls, names)
            except BaseException:
                shut_down(members, wait_s=get_seconds("close-timeout") or 0.0)
                raise
        self._set_up(resource_pool, _Life(members, detached), cia.cls, names, None)

    def _set_up(
        self,
        pool: ResourcePool | None,
        life: _Life,
        cls: type,
        names: list[str],
        role: str | None,
    ) -> None:
        super().__init__(pool)
        self._life = life
        self._cls = cls
        self._names = names
        self._role = role
        self._view_closed = False
        self._aliveness: AlivenessCheck | None = None
        self._bound = bind_class(cls, RESERVED_NAMES, role)
        self._roles: dict[str, DaskWorkerGroup] = {}
        self._mesh_lock = threading.Lock()
        for role_name, role_cls in role_classes(cls).items():
            view = object.__new__(DaskWorkerGroup)
            view._set_up(pool, life, role_cls, names, role_name)
            self._roles[role_name] = view
            for method, bound in view._bound.items():
                full = f"{role_name}_{method}"
                # Not through the forwarder: a role's meshes are known by the role alone.
                if full not in self._bound or is_forwarder(cls, full):
                    self._bound[full] = bound

    # ------------------------------------------------------------------ identity

    @property
    def _members(self) -> Members:
        return self._life.members

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._members.engine.name

    @property
    def client(self) -> Client:
        """The Dask client that the group talks through."""
        return self._members.engine.client

    @property
    def route(self) -> str:
        """How calls reach the hosts: ``"direct"`` or ``"scheduler"``."""
        return self._members.engine.route

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._members.engine.world_size

    @property
    def workers(self) -> list[RankHandle]:
        """One handle per rank, for calls to that rank alone."""
        engine = self._members.engine
        return [RankHandle(self, rank, self._names[rank], host) for rank, host in enumerate(engine.hosts)]

    @property
    def worker_names(self) -> list[str]:
        """Names of the ranks, in rank order; a detached group is found by them."""
        return list(self._names)

    @property
    def hosts(self) -> list[str]:
        """Address of each rank's Dask worker, in rank order."""
        return list(self._members.engine.hosts)

    @property
    def master_address(self) -> str:
        """Address of the rendezvous for ``torch.distributed``."""
        return self._members.master_addr

    @property
    def master_port(self) -> str:
        """Port of the rendezvous, as a string."""
        return str(self._members.master_port)

    def __repr__(self) -> str:
        engine = self._members.engine
        state = "closed" if engine.closed else f"broken, lost ranks {sorted(engine.lost)}" if engine.lost else "ready"
        role = f" role {self._role!r}" if self._role else ""
        return (
            f"<dask_controller.DaskWorkerGroup {engine.name!r}{role}: {self._cls.__name__} on {engine.world_size} "
            f"rank(s), {state}, route {engine.route}>"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_bound" not in self.__dict__:
            raise AttributeError(name)
        if name in self._roles:
            return self._roles[name]
        bound = self._bound.get(name)
        if bound is None:
            raise missing_method(self.name, self._cls, name, [*self._bound, *self._roles, *RESERVED_NAMES])
        return self._method(bound)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._bound, *self._roles]

    # ------------------------------------------------------------------ marked methods

    def _method(self, bound: BoundMethod) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call_bound(bound, args, kwargs)

        method.__name__ = bound.name
        method.__qualname__ = f"{self._cls.__name__}.{bound.name}"
        method.__doc__ = bound.doc
        if bound.signature is not None:
            parameters = list(bound.signature.parameters.values())[1:]
            method.__signature__ = bound.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    def _call_bound(self, bound: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_view(bound.name)
        mode = bound.mode
        owner = self if self._role is not None or "." not in bound.remote_name else self._owner_of(bound)
        sent_args, sent_kwargs = _checked_pair(bound.name, mode.dispatch_fn(owner, *args, **kwargs))
        ranks = [0] if mode.is_rank_zero else list(range(self.world_size))
        if mode.is_pass_through:
            per_rank_args, per_rank_kwargs = _pass_through(sent_args, sent_kwargs, ranks, mode.is_rank_zero)
        else:
            per_rank_args, per_rank_kwargs = self._per_rank(bound, sent_args, sent_kwargs, ranks)
        self._check_signature(bound, per_rank_args, per_rank_kwargs)
        mask = None if mode.collect_mask is None else list(mode.collect_mask(owner))
        if mask is not None:
            mask = [mask[rank] for rank in ranks]
        results = self._send(
            bound.remote_name,
            ranks,
            per_rank_args,
            per_rank_kwargs,
            blocking=bound.blocking,
            collect=mask,
            materialize=bound.materialize_futures,
        )
        if mode.is_rank_zero and mode.collect_fn is collect_all_to_all:
            return results[0]
        outputs = RankOutputs(results, call_padding(sent_args, sent_kwargs))
        collected = mode.collect_fn(owner, outputs)
        # client.gather and kin look into plain lists only.
        return list(collected) if collected is outputs else collected

    @staticmethod
    def _check_signature(bound: BoundMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if bound.signature is None:
            return
        try:
            # The first parameter is the rank's object.
            bound.signature.bind(None, *args, **kwargs)
        except TypeError as error:
            parameters = list(bound.signature.parameters.values())[1:]
            raise DispatchError(
                f"{bound.name}() {error}: it takes {bound.signature.replace(parameters=parameters)}. No rank was called"
            ) from None

    def _owner_of(self, bound: BoundMethod) -> DaskWorkerGroup:
        # Meshes belong to the role that registered them.
        return self._roles[bound.remote_name.partition(".")[0]]

    def _per_rank(
        self, bound: BoundMethod, args: Any, kwargs: Any, ranks: Sequence[int]
    ) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        labelled = [(f"argument {i + 1}", value) for i, value in enumerate(args)] + [
            (f"argument {name!r}", value) for name, value in kwargs.items()
        ]
        for label, value in labelled:
            if not isinstance(value, (list, tuple)) or len(value) != self.world_size:
                got = f"{len(value)} elements" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
                raise DispatchError(
                    f"{label} of {bound.name}() was dispatched as {got}; expected a list with one element per rank, "
                    f"{self.world_size} in all. No rank was called"
                )
        return (
            [[value[rank] for rank in ranks] for value in args],
            {name: [value[rank] for rank in ranks] for name, value in kwargs.items()},
        )

    def _send(
        self,
        method: str,
        ranks: Sequence[int],
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Sequence[Any]],
        *,
        blocking: bool,
        collect: Sequence[bool] | None = None,
        materialize: bool = True,
    ) -> list[Any]:
        engine = self._members.engine
        call, futures = engine.issue(
            method, ranks, args, kwargs, blocking=blocking, collect=collect, materialize=materialize
        )
        if not blocking:
            return futures
        values = engine.wait(call, get_seconds("call-timeout"))
        return [values[rank] for rank in ranks]

    def _check_view(self, method: str) -> None:
        if self._view_closed:
            raise GroupClosedError(f"{method}() was called on group {self.name!r}, which is closed; make a new group")

    # ------------------------------------------------------------------ any method, marked or not

    def _call_ranks(
        self, method: str, ranks: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any], *, blocking: bool
    ) -> list[Any]:
        self._check_view(method)
        remote = method if self._role is None else f"{self._role}.{method}"
        n = len(ranks)
        return self._send(
            remote,
            ranks,
            [[value] * n for value in args],
            {name: [value] * n for name, value in kwargs.items()},
            blocking=blocking,
        )

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Same as :meth:`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 and return its result. Blocks."""
        return self._call_ranks(method_name, [0], args, kwargs, blocking=True)[0]

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call any method on rank 0; the result stays on its host. Does not block."""
        out: Future[Any] = self._call_ranks(method_name, [0], args, kwargs, blocking=False)[0]
        return out

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Same as :meth:`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method on every rank and return the list of results. Blocks.

        Arguments go to every rank as they are; if all of them are lists with one element per rank, each rank gets its
        own element.
        """
        return self._execute_all(method_name, args, kwargs, blocking=True)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call any method on every rank, arguments as in :meth:`execute_all_sync`; results stay on the hosts."""
        return self._execute_all(method_name, args, kwargs, blocking=False)

    def _execute_all(self, method: str, args: Any, kwargs: Any, *, blocking: bool) -> list[Any]:
        self._check_view(method)
        ranks = list(range(self.world_size))
        sent_args, sent_kwargs = _pass_through(args, kwargs, ranks, False)
        remote = method if self._role is None else f"{self._role}.{method}"
        return self._send(remote, ranks, sent_args, sent_kwargs, blocking=blocking)

    def put(self, value: Any) -> Future[Any]:
        """Place a value on every host of the group once, to be passed to its methods as often as wished.

        Parameters
        ----------
        value : object
            Anything that travels, such as a frozen batch or a configuration.

        Returns
        -------
        distributed.Future
            Give it to a ``ONE_TO_ALL`` method in the value's place; ranks get the value, without another transfer.
            Dropping it frees the memory.

        Notes
        -----
        Blocks until the value is there. All ranks of a host, and all calls, get the same object: like the inputs of
        a Dask task it must not be written in place.
        """
        engine = self._members.engine
        engine.check_usable("put")
        hosts = list(dict.fromkeys(engine.hosts))
        direct = engine.route == "direct"
        # In a list, because scatter takes a dict apart; without a content hash, which races with release.
        (future,) = engine.client.scatter([value], workers=hosts, broadcast=True, direct=direct, hash=False)
        return cast("Future[Any]", future)

    # ------------------------------------------------------------------ roles

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, DaskWorkerGroup]:
        """The group once per role of a colocated class: same ranks, the methods of that role.

        Parameters
        ----------
        prefix_set : iterable of str
            Role names.

        Raises
        ------
        RegistrationError
            The class has no such role.
        """
        return {role: self._role_view(role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make roles attributes of the group: ``group.actor.method()``. Checks that they exist."""
        for role in prefix_set:
            self.__dict__[role] = self._role_view(role)

    def _role_view(self, role: str) -> DaskWorkerGroup:
        view = self._roles.get(role)
        if view is None:
            raise RegistrationError(
                f"group {self.name!r} has no role {role!r}; roles: {sorted(self._roles) or 'none'}. Make the class "
                "with create_colocated_worker_cls"
            )
        return view

    # ------------------------------------------------------------------ state and end

    def status(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """What every rank is doing now, without waiting for it.

        Parameters
        ----------
        timeout_s : float
            How long to wait for a host's answer, in seconds.

        Returns
        -------
        list of dict
            Per rank, in rank order: rank, host, pid, state, running calls with their seconds, queue length. A host
            that does not answer gives ``state="unreachable"``.
        """
        return self._members.engine.client.sync(self._status, timeout_s)  # type: ignore[no-any-return]

    async def _status(self, timeout_s: float) -> list[dict[str, Any]]:
        import asyncio

        engine = self._members.engine

        async def ask(address: str) -> list[dict[str, Any]]:
            try:
                return await asyncio.wait_for(
                    call_host(engine.client, address, "status", route=engine.route, group_id=engine.group_id),
                    timeout_s,
                )
            except Exception:
                return []

        answers = await asyncio.gather(*(ask(address) for address in dict.fromkeys(engine.hosts)))
        # Lists arrive as tuples.
        known = {entry["rank"]: {**entry, "running": list(entry["running"])} for answer in answers for entry in answer}
        return [
            known.get(rank, {"rank": rank, "host": host, "state": "lost" if rank in engine.lost else "unreachable"})
            for rank, host in enumerate(engine.hosts)
        ]

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Ask every host now and then whether it lives; log an error once when one does not.

        Never ends the program. A lost host is noticed without this as soon as its connection breaks; this also notices
        hosts that are stopped. Runs on the client's event loop until the group closes.

        Parameters
        ----------
        every_n_seconds : float
            Seconds between two rounds.
        """
        if self._aliveness is None:
            self._aliveness = AlivenessCheck(self._members.engine, float(every_n_seconds))

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankHandle] | None = None,
        dask_cls_with_init: ClassWithInitArgs | None = None,
        *,
        client: Client | None = None,
    ) -> DaskWorkerGroup:
        """Attach to a detached group that this or another program made.

        Parameters
        ----------
        name_prefix : str, optional
            Name of the group.
        worker_names, worker_handles : sequence, optional
            Its ranks, instead of the name.
        dask_cls_with_init : DaskClassWithInitArgs, optional
            Class of the ranks; by default the one it was made with.
        client : distributed.Client, optional
            Default: the current one, also inside a Dask task.

        Raises
        ------
        PlacementError
            No such group.
        """
        client = _resolve_client(client, None)
        if name_prefix is None:
            if worker_names is None and worker_handles is None:
                raise PlacementError("from_detached needs the name of a group or the names of its ranks")
            names = list(worker_names or [handle.name for handle in worker_handles or ()])
            name_prefix = detached_groups.find_detached(client, names)
        members, record = detached_groups.attach_detached(client, name_prefix)
        rank_cls = dask_cls_with_init.cls if dask_cls_with_init is not None else cloudpickle.loads(record["cls"])
        self = cls.__new__(cls)
        self._set_up(None, _Life(members, True), rank_cls, list(record["worker_names"]), None)
        return self

    def close(self, timeout_s: float | None = None) -> None:
        """End the ranks and free their slots; a detached group is only let go of. Can be repeated.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait for ranks that still run a call, in seconds. A call that runs longer goes on, and its slot
            is freed when it ends. Closing a role of a colocated group closes that view only.
        """
        if self._role is not None:
            self._view_closed = True
            return
        wait_s = _seconds(timeout_s, "close-timeout")
        shut_down(self._members, wait_s=wait_s, end_ranks=not self._life.detached)
        self._life.finalizer.detach()

    def __enter__(self) -> DaskWorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Names of members of a group, which neither marked methods nor roles may have.
RESERVED_NAMES = frozenset(name for name in [*dir(DaskWorkerGroup), "resource_pool"] if not name.startswith("__"))


def _checked_pair(method: str, dispatched: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a dispatch function returned, which may be a user's."""
    if isinstance(dispatched, (list, tuple)) and len(dispatched) == 2:
        args, kwargs = dispatched
        if isinstance(args, (list, tuple)) and isinstance(kwargs, Mapping):
            return args, kwargs
        got = f"a {type(args).__name__} and a {type(kwargs).__name__}"
    else:
        got = f"a {type(dispatched).__name__}"
    raise DispatchError(
        f"the dispatch function of {method}() must return (args, kwargs), a list or tuple and a mapping; got {got}. No "
        "rank was called"
    )


def _pass_through(
    args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Sequence[int], rank_zero: bool
) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """Arguments of a call without a dispatch function: each rank its own element, or all the same."""
    n = len(ranks)
    values = [*args, *kwargs.values()]
    split = bool(values) and not rank_zero and all(isinstance(v, list) and len(v) == n for v in values)
    if split:
        return [list(value) for value in args], {name: list(value) for name, value in kwargs.items()}
    return [[value] * n for value in args], {name: [value] * n for name, value in kwargs.items()}


def _dask_cia(cia: ClassWithInitArgs) -> DaskClassWithInitArgs:
    if isinstance(cia, DaskClassWithInitArgs):
        return cia
    return DaskClassWithInitArgs(cia.cls, *cia.args, **cia.kwargs)


def _check_class(cls: type) -> None:
    if inspect.isabstract(cls):
        raise RegistrationError(
            f"{cls.__name__} is abstract ({', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}) and cannot be "
            "built on a rank"
        )
    bind_class(cls, RESERVED_NAMES)
    for role, role_cls in role_classes(cls).items():
        if role in RESERVED_NAMES:
            raise RegistrationError(f"role {role!r} has the name of a member of groups; choose another")
        bind_class(role_cls, RESERVED_NAMES, role)


def _seconds(value: float | None, setting: str) -> float:
    if value is None:
        return get_seconds(setting) or 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise RegistrationError(f"a time limit is a number of seconds, got {value!r}")
    return float(value)


def _resolve_client(client: Client | None, pool: ResourcePool | None) -> Client:
    client = client or getattr(pool, "client", None)
    if client is None:
        client = current_client()
    if client.asynchronous:
        raise PlacementError(
            "groups need a synchronous client: this one was made with asynchronous=True, and a blocking call would "
            "stop its event loop. Make a second Client(address) for the group"
        )
    if client.status != "running":
        raise PlacementError(f"the Dask client is {client.status}; make a new one with Client(address)")
    return client
