"""Batches that stay on the hosts that made them.

Owns :class:`DataProtoFuture`: a plan (:mod:`.plan`) together with the Dask futures of its parts. The controller handles
lengths and plans, never rows, until somebody asks for them with :meth:`DataProtoFuture.get`. Also owns turning a plan
into what a host must fetch (:func:`plan_reference`).
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dask.typing import Key
from distributed import Client, Future

from dask_controller.config import get_nbytes
from dask_controller.errors import (
    ChunkError,
    ChunkLostError,
    DataProtoError,
    RankTimeoutError,
    UnsupportedTypeError,
)
from dask_controller.protocol.batching import Padding
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.plan import (
    Chunk,
    Columns,
    ColumnStep,
    Concat,
    Node,
    Repeat,
    Rows,
    Source,
    Union,
    assemble,
    keys_of,
    pieces_of,
)
from dask_controller.protocol.serialize import Packed, unpack
from dask_controller.runtime.channel import call_host
from dask_controller.runtime.clients import client_loop, current_client, run_on_client, scheduler_of, while_host_lives
from dask_controller.runtime.futures import ResultInfo, adopt, info_of, locate, wait_done
from dask_controller.runtime.service import install_service, pick_rows
from dask_controller.runtime.shm import Link, fetch_link

__all__ = ["DataProtoFuture", "plan_reference"]


#: Rows to fetch: key, address, first row (None: the whole value), end, index as bytes where rows are scattered, origin
#: for messages, producing rank.
Part = tuple[Key, str, int | None, int | None, bytes | None, str, int]

#: What a DataProto has and its future has not.
_BATCH_NAMES = frozenset(name for name in [*dir(DataProto), "non_tensor_batch"] if not name.startswith("_"))


class DataProtoFuture:
    """A batch whose rows lie on the hosts of the ranks that made them.

    The result of a non-blocking call whose ranks return DataProto or TensorDict. Give it to another group's method
    and each of its ranks fetches the rows it needs from the host that holds them; no row passes through the
    controller. Rows and columns can be chosen, repeated and joined without bringing them home. Dropping the object
    frees the memory on the hosts.

    Parameters
    ----------
    futures : sequence of distributed.Future
        One per part, in row order. Each must hold a DataProto or TensorDict.

    Notes
    -----
    Ranks that share a host with the producer get the producer's own tensors, not a copy: like the inputs of a Dask
    task they must not be written in place.

    Methods that return a DataProtoFuture move no data and wait for nothing; a mistake in them that only the data can
    show (a column that does not exist, a mask of the wrong length) is raised where the rows are used.
    """

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        futures = tuple(futures)
        if not futures:
            raise DataProtoError("a DataProtoFuture needs at least one future, got none")
        for future in futures:
            if not isinstance(future, Future):
                raise UnsupportedTypeError(
                    f"a DataProtoFuture is made of distributed.Future objects, got {type(future).__name__}"
                )
        self._futures: dict[Key, Future[Any]] = {future.key: future for future in futures}
        self._node: Node = Source(tuple(future.key for future in futures))

    def _of(self, node: Node, *others: DataProtoFuture) -> DataProtoFuture:
        out = object.__new__(DataProtoFuture)
        out._node = node
        known = dict(self._futures)
        for other in others:
            known.update(other._futures)
        out._futures = {key: known[key] for key in keys_of(node)}
        return out

    @classmethod
    def from_futures(cls, futures: Sequence[Future[Any]]) -> DataProtoFuture:
        """A batch out of futures that hold DataProto or TensorDict, in row order."""
        return cls(futures)

    # ------------------------------------------------------------------ looking

    @property
    def futures(self) -> list[Future[Any]]:
        """The ``distributed.Future`` objects of all ranks that contribute, without repetition."""
        return list(self._futures.values())

    @property
    def _client(self) -> Client:
        for future in self.futures:
            if future.client is None:  # unpickled here
                adopt(future, current_client())
        client: Client = self.futures[0].client
        return client

    def done(self) -> bool:
        """Whether every contributing rank has answered or failed. Does not block."""
        return all((info.done.done() if (info := info_of(f)) else f.done()) for f in self.futures)

    def __len__(self) -> int:
        """Rows, once every contributing rank has answered.

        Raises
        ------
        DataProtoError
            Not known yet, or not known without asking the hosts.
        """
        lengths: list[int] = []
        for future in self.futures:
            info = info_of(future)
            if info is None or not info.done.done() or info.done.result().rows is None:
                raise DataProtoError("the length is not known yet: wait for it with .result(), or distributed.wait")
            lengths.append(info.done.result().rows or 0)
        numbering = {key: i for i, key in enumerate(self._futures)}
        return len(self._node.strands(numbering, dict(enumerate(lengths)))[0].rows)

    if not TYPE_CHECKING:  # a type checker would take it as a promise of every attribute

        def __getattr__(self, name: str) -> Any:
            # Asked for names that are not here. Those of the batch are, when get() was forgotten.
            hint = ". Its rows lie on the hosts that made them: get() brings them here" if name in _BATCH_NAMES else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        futures = self.futures
        state = "finished" if self.done() else "pending"
        return f"<dask_controller.DataProtoFuture: {state}, {len(futures)} part(s)>"

    def keys(self, timeout: float | None = None) -> list[str]:
        """Names of the columns, tensors first. Waits for the ranks; only names travel.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.
        """
        empty = self[0:0].get(timeout)
        if hasattr(empty, "non_tensor_batch"):
            return [*(empty.batch.keys() if empty.batch is not None else ()), *empty.non_tensor_batch]
        return list(empty.keys())

    # ------------------------------------------------------------------ rows

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into exactly ``chunks`` batches of nearly equal size.

        Parameters
        ----------
        chunks : int
            Number of pieces. The first ones are one row longer where the rows do not divide.
        """
        _check_count(chunks, "chunks")
        return [self._of(Chunk(self._node, i, chunks)) for i in range(chunks)]

    def chunk_padded(
        self, chunks: int, auto_padding: bool | None = None, padding: Padding | None = None
    ) -> tuple[list[DataProtoFuture], Padding]:
        """Cut into ``chunks`` batches of equal size for dispatch.

        Parameters
        ----------
        chunks : int
            Number of pieces.
        auto_padding : bool, optional
            Repeat the last row until the pieces are equal. Default: ``DataProtoConfig.auto_padding``.
        padding : Padding, optional
            How another argument of the same call is cut; this batch must have as many rows.

        Returns
        -------
        pieces : list of DataProtoFuture
            One per chunk.
        padding : Padding
            Becomes known when the lengths do. Using a piece raises ChunkError if they do not divide.
        """
        from dask_controller.protocol.config import DataProtoConfig

        _check_count(chunks, "chunks")
        enabled = bool(DataProtoConfig.auto_padding) if auto_padding is None else auto_padding
        shared = Padding() if padding is None else padding
        return [self._of(Chunk(self._node, i, chunks, shared, enabled)) for i in range(chunks)], shared

    def without_padding(self, padding: Padding) -> DataProtoFuture:
        """The same batch without the rows that padding had added to the arguments of the call that made it.

        Parameters
        ----------
        padding : Padding
            How the arguments were cut; one entry per part of this batch.
        """
        if not isinstance(self._node, Source):
            raise DataProtoError("only the direct result of a call can have its padding removed")
        return self._of(Source(self._node.keys, padding))

    def select_idxs(self, idxs: Any) -> DataProtoFuture:
        """Rows by number or mask.

        Parameters
        ----------
        idxs : list, numpy array or tensor
            Row numbers in any order, also several times, or a mask of the batch's length.
        """
        return self._of(Rows(self._node, _index(idxs)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProtoFuture:
        """Rows by a Python slice."""
        return self._of(Rows(self._node, slice(start, end, step)))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProtoFuture:
        """Every row ``repeat_times`` times; the copies are made where the rows are used.

        Parameters
        ----------
        repeat_times : int
            How often.
        interleave : bool
            Copies of one row next to each other, or the whole batch again and again.
        """
        _check_count(repeat_times, "repeat_times")
        return self._of(Repeat(self._node, repeat_times, interleave))

    def reorder(self, indices: Any) -> None:
        """Put the rows into another order, in place, as ``DataProto.reorder`` does.

        Parameters
        ----------
        indices : list, numpy array or tensor
            Row numbers.
        """
        self._node = Rows(self._node, _index(indices))

    def __getitem__(self, item: Any) -> Any:
        """Rows as a DataProtoFuture, or one column as data.

        ``fut["rewards"]`` brings that column only: a tensor or numpy array. A slice, list, array, tensor or mask gives
        the rows as a DataProtoFuture; an int gives one row as a DataProtoItem.
        """
        if isinstance(item, str):
            batch = self._column(("column", item)).get()
            if hasattr(batch, "non_tensor_batch"):
                return batch.non_tensor_batch[item] if item in batch.non_tensor_batch else batch.batch[item]
            return batch[item]
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            return self.select_idxs([int(item)]).get()[0]
        return self.select_idxs(item)

    # ------------------------------------------------------------------ columns

    def _column(self, step: ColumnStep) -> DataProtoFuture:
        return self._of(Columns(self._node, step))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProtoFuture:
        """Some of the columns; the others stay where they are. None keeps all of a kind."""
        return self._column(("select", _keys(batch_keys), _keys(non_tensor_batch_keys), _keys(meta_info_keys)))

    def pop(
        self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None
    ) -> DataProtoFuture:
        """Take columns out of this batch, in place, and return them as a batch of their own."""
        keys = [*(batch_keys or ()), *(non_tensor_batch_keys or ())]
        if not keys:
            raise DataProtoError("pop needs the names of columns to take out, got none")
        out = self._column(("select", list(batch_keys or ()), list(non_tensor_batch_keys or ()), []))
        self._node = Columns(self._node, ("drop", keys))
        return out

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProtoFuture:
        """Columns under other names."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise DataProtoError(
                f"rename got {len(old)} old names and {len(new)} new ones; their numbers must be equal"
            )
        return self._column(("rename", old, new))

    def union(self, other: DataProtoFuture) -> DataProtoFuture:
        """The columns of both batches side by side; rows must correspond.

        Parameters
        ----------
        other : DataProtoFuture
            A batch of as many rows. A column of both must be equal in both.
        """
        if not isinstance(other, DataProtoFuture):
            raise UnsupportedTypeError(
                f"union puts DataProtoFuture objects side by side, got {type(other).__name__}; bring this batch home "
                "with get() and use DataProto.union"
            )
        return self._of(Union((self._node, other._node)), other)

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """Batches one after the other."""
        data = list(data)
        if not data:
            raise DataProtoError("concat needs at least one DataProtoFuture, got an empty list")
        for item in data:
            if not isinstance(item, DataProtoFuture):
                raise UnsupportedTypeError(
                    f"DataProtoFuture.concat joins DataProtoFuture objects, got {type(item).__name__}"
                )
        if len(data) == 1:
            return data[0]
        return data[0]._of(Concat(tuple(item._node for item in data)), *data[1:])

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Apply a function to the batch where its rows are, as Dask tasks on those hosts.

        Parameters
        ----------
        function : callable
            Called as ``function(part, *args, **kwargs)`` on a DataProto or TensorDict for each part of this batch, in
            no particular order; returns one. It must not write to its argument.
        *args, **kwargs
            Further arguments, sent to every part.

        Returns
        -------
        DataProtoFuture
            The results, joined in row order.

        Notes
        -----
        Waits for the ranks that make this batch where rows were chosen or padding is to be removed; else does not
        block. The tasks run on the threads of the hosts, beside the ranks.
        """
        if not callable(function):
            raise UnsupportedTypeError(f"map needs a function, got {type(function).__name__}")
        client = self._client
        if isinstance(self._node, Source) and self._node.padding is None:
            plans = [_plan([(key, "", None, None, None, "", -1)], is_batch=True) for key in self._node.keys]
        else:
            whole = run_on_client(client, plan_reference, client, self)
            plans = _split_plan(whole)
        out = []
        for plan in plans:
            keys = list(dict.fromkeys(piece[0] for strand in plan["strands"] for piece in strand["pieces"]))
            futures = [self._futures[key] for key in keys]
            info = info_of(futures[0])
            out.append(
                client.submit(
                    _map_part,
                    function,
                    plan,
                    keys,
                    futures,
                    args,
                    kwargs,
                    # A wish, not an order: if the host is gone the error should come from there, not a wait.
                    workers=None if info is None else [info.host],
                    allow_other_workers=info is not None,
                    pure=False,
                )
            )
        return DataProtoFuture(out)

    # ------------------------------------------------------------------ bringing it home

    def get(self, timeout: float | None = None) -> Any:
        """The batch itself: fetched from the hosts and joined here. Can be repeated.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; for ever by default, though never for a rank that is known to be lost.

        Returns
        -------
        DataProto or TensorDict
            What the ranks returned, joined in rank order.

        Raises
        ------
        RankFailedError, RankLostError
            A contributing rank failed, or its host was lost before it answered.
        ChunkLostError
            The data were made but are gone.
        RankTimeoutError
            Not all ranks answered within ``timeout``.
        GroupClosedError
            The group or its client was closed first.
        """
        client = self._client
        try:
            fetched = run_on_client(client, self._fetch, client, timeout_s=timeout)
        except TimeoutError as error:
            if isinstance(error, RankTimeoutError):
                raise
            raise self._timeout_error(timeout or 0.0) from error
        return _assemble(fetched)

    def result(self, timeout: float | None = None) -> Any:
        """Same as :meth:`get`."""
        return self.get(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._get_async().__await__()

    async def _get_async(self) -> Any:
        client = self._client
        loop = client_loop(client)
        if loop is asyncio.get_running_loop():
            return _assemble(await self._fetch(client))
        return _assemble(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._fetch(client), loop)))

    def _timeout_error(self, timeout_s: float) -> RankTimeoutError:
        finished: list[int] = []
        pending: list[int] = []
        methods: set[str] = set()
        for future in self.futures:
            info = info_of(future)
            if info is not None:
                (finished if info.done.done() else pending).append(info.rank)
                methods.add(info.method)
        method = ", ".join(sorted(methods))
        return RankTimeoutError(
            f"{method or 'the batch'}() was not there after {timeout_s:g} s: ranks {pending} have not answered, ranks "
            f"{finished} have. The call goes on; get() may be called again",
            method,
            timeout_s,
            finished,
            pending,
        )

    async def _fetch(self, client: Client) -> list[tuple[list[Packed], Any]]:
        plan = await plan_reference(client, self)
        routes = {key: info.route for key, f in self._futures.items() if (info := info_of(f)) is not None}
        default = "direct" if client.direct_to_workers else "scheduler"

        async def strand(description: dict[str, Any]) -> tuple[list[Packed], Any]:
            pieces = await asyncio.gather(
                *(
                    _fetch_piece(client, piece, description["columns"], routes.get(piece[0], default))
                    for piece in description["pieces"]
                )
            )
            return list(pieces), description["order"]

        return list(await asyncio.gather(*(strand(description) for description in plan["strands"])))


def _check_count(count: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ChunkError(f"{what} must be an int of at least 1, got {count!r}")


def _keys(keys: Sequence[str] | None) -> list[str] | None:
    return None if keys is None else list(keys)


def _index(idxs: Any) -> Any:
    if isinstance(idxs, torch.Tensor):
        idxs = idxs.detach().cpu().numpy()
    index = np.asarray(idxs)
    if index.size == 0:
        index = index.astype(np.int64)
    if index.ndim != 1 or index.dtype.kind not in "biu":
        raise DataProtoError(
            f"rows are picked by a 1-D list of ints or bools, got shape {index.shape} of dtype {index.dtype}"
        )
    return index if index.dtype == np.bool_ else index.astype(np.int64)


def _assemble(fetched: Sequence[tuple[Sequence[Packed], Any]]) -> Any:
    return assemble([([unpack(piece) for piece in pieces], _order(order)) for pieces, order in fetched])


def _order(order: bytes | None) -> Any:
    return None if order is None else np.frombuffer(order, dtype=np.int64)


def _map_part(
    function: Callable[..., Any],
    plan: dict[str, Any],
    keys: Sequence[str],
    values: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Runs as a Dask task where the rows are."""
    by_key = dict(zip(keys, values, strict=True))

    def rows(piece: Sequence[Any], columns: Sequence[Any]) -> Any:
        key, _, start, stop, index, _, _ = piece
        return pick_rows(by_key[key], start, stop, index, columns)

    strands = [
        ([rows(piece, strand["columns"]) for piece in strand["pieces"]], _order(strand["order"]))
        for strand in plan["strands"]
    ]
    return function(assemble(strands), *args, **kwargs)


def _plan(pieces: Sequence[Part], is_batch: bool) -> dict[str, Any]:
    return {"strands": [{"pieces": list(pieces), "columns": [], "order": None}], "is_batch": is_batch}


def _split_plan(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One plan per piece where pieces can be mapped by themselves, else the whole plan."""
    strands = plan["strands"]
    if len(strands) > 1 or strands[0]["order"] is not None:
        return [plan]
    return [{"strands": [{**strands[0], "pieces": [piece]}]} for piece in strands[0]["pieces"]]


async def _fetch_piece(client: Client, piece: Sequence[Any], columns: Sequence[Any], route: str) -> Packed:
    key, address, start, stop, index, origin, rank = piece
    tried: set[str] = set()
    # Through the scheduler there is no telling which machine the host is on.
    limit = get_nbytes("shared-memory-limit") if route == "direct" else 0
    for _ in range(3):
        request = {"key": key, "start": start, "stop": stop, "index": index, "columns": columns}
        if limit:
            request["hello"] = {**Link(limit).hello(), "limit": limit}
        try:
            answer = await while_host_lives(
                call_host(client, address, "fetch", route=route, **request), scheduler_of(client), address
            )
        except OSError:
            answer = {"missing": True}
        if "value" in answer:
            release = partial(_release, client, address, limit)
            try:
                packed = fetch_link(limit, asyncio.get_running_loop(), release).decode(answer["value"])
            except OSError:
                limit = 0  # that host's memory cannot be opened from here
                continue
            return packed.copied() if address.startswith("inproc://") else packed
        if "raise" in answer:
            raise pickle.loads(answer["raise"])
        if "error" in answer:
            raise ChunkLostError(
                f"{origin} cannot be sent by its host {address}: {answer['error']}", "", str(key), rank, address
            )
        tried.add(address)
        others = [a for a in await locate(client, key) if a not in tried]
        if not others:
            break
        address = others[0]
    raise ChunkLostError(
        f"{origin} is gone: host {address} does not have it any more. The host was lost or the future was released; "
        "run the producing call again",
        "",
        str(key),
        rank,
        address,
    )


async def _release(client: Client, address: str, limit: int, segment: int) -> None:
    await call_host(client, address, "release", route="direct", segments=[segment], limit=limit)


async def plan_reference(client: Client, reference: Future[Any] | DataProtoFuture) -> dict[str, Any]:
    """What a host must fetch for the data that ``reference`` stands for.

    Waits until the data exist. Runs on the client's event loop; only lengths and addresses travel.

    Returns
    -------
    dict
        ``is_batch`` is False for a single future, whose value is taken as it is. ``strands`` is a list of
        ``{"pieces", "columns", "order"}``; for a piece see :data:`Part`.
    """
    if isinstance(reference, Future):
        adopt(reference, client)
        await wait_done(reference, client)
        address, origin, rank, _ = await _facts(client, reference, need_rows=False)
        return _plan([(reference.key, address, None, None, None, origin, rank)], is_batch=False)
    futures = reference._futures
    for future in futures.values():
        adopt(future, client)
    await asyncio.gather(*(wait_done(future, client) for future in futures.values()))
    facts = await asyncio.gather(*(_facts(client, future, need_rows=True) for future in futures.values()))
    keys = list(futures)
    numbering = {key: i for i, key in enumerate(keys)}
    lengths = {i: fact[3] or 0 for i, fact in enumerate(facts)}
    strands = []
    for strand in reference._node.strands(numbering, lengths):
        pieces, order = pieces_of(strand.rows)
        described: list[Part] = []
        for piece in pieces:
            address, origin, rank, rows = facts[piece.part]
            whole = piece.index is None and piece.start == 0 and piece.stop == rows
            described.append(
                (
                    keys[piece.part],
                    address,
                    None if whole else piece.start,
                    None if whole else piece.stop,
                    None if piece.index is None else piece.index.tobytes(),
                    origin,
                    rank,
                )
            )
        strands.append(
            {
                "pieces": described,
                "columns": [list(step) for step in strand.columns],
                "order": None if order is None else order.tobytes(),
            }
        )
    return {"strands": strands, "is_batch": True}


async def _facts(client: Client, future: Future[Any], need_rows: bool) -> tuple[str, str, int, int | None]:
    key = future.key
    info: ResultInfo | None = info_of(future)
    if info is not None:
        kept = info.done.result()
        if need_rows and kept.rows is None:
            raise UnsupportedTypeError(
                f"{info.origin} is a {kept.type_name}, which cannot be cut into rows; return a DataProto or TensorDict"
            )
        return info.host, info.origin, info.rank, kept.rows
    origin = f"the data of future {key!r}"
    holders = await locate(client, key)
    if not holders:
        raise ChunkLostError(f"{origin} are gone: no host has them. They were released or lost", "", str(key))
    address = holders[0]
    # Makes sure that the host can be asked for rows: it may never have met this package.
    answer = await client._run(install_service, workers=[address], on_error="return")
    if isinstance(answer.get(address), BaseException):
        raise ChunkLostError(
            f"{origin} lie on host {address}, which cannot serve them: {answer[address]}", "", str(key), -1, address
        ) from answer[address]
    rows: int | None = None
    if need_rows:
        counts = await call_host(client, address, "rows", route="scheduler", keys=[key])
        rows = counts.get(key)
        if rows is None:
            raise UnsupportedTypeError(
                f"{origin} cannot be cut into rows; put a DataProto or TensorDict there, or pass the future to a "
                "ONE_TO_ALL method"
            )
    return address, origin, -1, rows
