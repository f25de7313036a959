"""Batches that stay on the hosts that made them.

Owns :class:`DataProtoFuture` and the row plans behind it: which rows of which keys make up a batch. A plan is a
small tree over futures, evaluated once the lengths are known; the controller handles lengths and plans, never the
rows, until somebody asks for them with :meth:`DataProtoFuture.get`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Client, Future

from dask_controller.errors import (
    BatchMismatchError,
    ChunkError,
    ChunkLostError,
    DataProtoError,
    RankTimeoutError,
    UnsupportedTypeError,
)
from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.batching import Padding, chunk_bounds
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.serialize import Packed, unpack
from dask_controller.runtime.channel import call_host
from dask_controller.runtime.clients import client_loop
from dask_controller.runtime.futures import ResultInfo, info_of, locate, wait_done
from dask_controller.runtime.service import decode, install_service

__all__ = ["DataProtoFuture", "Segment", "cut_segments", "plan_reference"]


@dataclass(frozen=True)
class Segment:
    """Rows ``[start, stop)`` of the value of one key."""

    key: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def cut_segments(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Rows ``[start, stop)`` of what ``segments`` make up together.

    An empty range gives one empty segment rather than none, so that dtypes and trailing shapes stay known.
    """
    out: list[Segment] = []
    offset = 0
    for segment in segments:
        low, high = max(start, offset), min(stop, offset + segment.rows)
        if low < high:
            out.append(Segment(segment.key, segment.start + low - offset, segment.start + high - offset))
        offset += segment.rows
    if not out:
        first = segments[0]
        out.append(Segment(first.key, first.start, first.start))
    return out


# ---------------------------------------------------------------------- plan trees


@dataclass(frozen=True)
class _Source:
    """Results joined in rank order, without the padding that dispatch had added."""

    futures: tuple[Future[Any], ...]
    padding: Padding | None = None

    def segments(self, rows: Mapping[str, int]) -> list[Segment]:
        lengths = [rows[str(future.key)] for future in self.futures]
        if self.padding is not None:
            lengths = self.padding.kept(lengths)
        return [Segment(str(future.key), 0, length) for future, length in zip(self.futures, lengths, strict=True)]

    def sources(self) -> list[_Source]:
        return [self]


@dataclass(frozen=True)
class _Concat:
    """Batches one after the other."""

    nodes: tuple[_Node, ...]

    def segments(self, rows: Mapping[str, int]) -> list[Segment]:
        return [segment for node in self.nodes for segment in node.segments(rows)]

    def sources(self) -> list[_Source]:
        return [source for node in self.nodes for source in node.sources()]


@dataclass(frozen=True)
class _Chunk:
    """One of ``count`` pieces of a batch."""

    node: _Node
    index: int
    count: int
    #: For dispatch: pieces must be equal, after padding if ``auto_padding``. None: sizes may differ by one row.
    padding: Padding | None = None
    auto_padding: bool = False

    def segments(self, rows: Mapping[str, int]) -> list[Segment]:
        whole = self.node.segments(rows)
        total = sum(segment.rows for segment in whole)
        if self.padding is None:
            return cut_segments(whole, *chunk_bounds(total, self.count)[self.index])
        if total % self.count and not self.auto_padding:
            raise ChunkError(
                f"a batch of {total} rows cannot be cut into {self.count} equal chunks. Turn automatic padding on "
                "(DataProtoConfig.auto_padding = True), or make the producer return a multiple of "
                f"{self.count} rows"
            )
        if not self.padding.known:
            self.padding.set(total, self.count)
        assert self.padding.padded is not None
        expected = sum(self.padding.real or ())
        if expected != total:
            raise BatchMismatchError(
                f"the arguments of one call have different lengths: {expected} rows and {total} rows. "
                "No rank was called"
            )
        missing = sum(self.padding.padded) - total
        last = whole[-1] if whole else None
        if missing and last is not None:
            filled = [segment for segment in whole if segment.rows]
            last = filled[-1]
            whole = whole + [Segment(last.key, last.stop - 1, last.stop)] * missing
        start = sum(self.padding.padded[: self.index])
        return cut_segments(whole, start, start + self.padding.padded[self.index])

    def sources(self) -> list[_Source]:
        return self.node.sources()


_Node = _Source | _Concat | _Chunk


#: What a DataProto has and its future has not.
_BATCH_NAMES = frozenset(name for name in [*dir(DataProto), "non_tensor_batch"] if not name.startswith("_"))


class DataProtoFuture:
    """A batch whose rows lie on the hosts of the ranks that made them.

    The result of a non-blocking call whose ranks return DataProto or TensorDict. Give it to another group's method
    and each of its ranks fetches the rows it needs from the host that holds them; no row passes through the
    controller. Dropping the object frees the memory on the hosts.

    Parameters
    ----------
    futures : sequence of distributed.Future
        One per part, in row order. Each must hold a DataProto or TensorDict.

    Notes
    -----
    Ranks that share a host with the producer get the producer's own tensors, not a copy: like the inputs of a Dask
    task they must not be written in place.
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
        self._node: _Node = _Source(futures)

    @classmethod
    def _of(cls, node: _Node) -> DataProtoFuture:
        self = cls.__new__(cls)
        self._node = node
        return self

    @classmethod
    def from_futures(cls, futures: Sequence[Future[Any]]) -> DataProtoFuture:
        """A batch out of futures that hold DataProto or TensorDict, in row order."""
        return cls(futures)

    # ------------------------------------------------------------------ looking

    @property
    def futures(self) -> list[Future[Any]]:
        """The ``distributed.Future`` objects of all ranks that contribute, without repetition."""
        seen: dict[str, Future[Any]] = {}
        for source in self._node.sources():
            for future in source.futures:
                seen.setdefault(str(future.key), future)
        return list(seen.values())

    @property
    def _client(self) -> Client:
        client: Client | None = self.futures[0].client
        if client is None:
            raise DataProtoError(
                "this DataProtoFuture was unpickled where there is no Dask client; make a Client first, or use it "
                "inside a Dask task or rank"
            )
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
        rows: dict[str, int] = {}
        for future in self.futures:
            info = info_of(future)
            if info is None or not info.done.done() or info.done.result().rows is None:
                raise DataProtoError("the length is not known yet: wait for it with .result(), or distributed.wait")
            rows[str(future.key)] = info.done.result().rows or 0
        return sum(segment.rows for segment in self._node.segments(rows))

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

    # ------------------------------------------------------------------ cutting and joining

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into exactly ``chunks`` batches of nearly equal size. No data move, and nothing is waited for.

        Parameters
        ----------
        chunks : int
            Number of pieces. The first ones are one row longer where the rows do not divide.
        """
        _check_count(chunks)
        return [self._of(_Chunk(self._node, i, chunks)) for i in range(chunks)]

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
        from dask_controller.protocol.data_proto import DataProtoConfig

        _check_count(chunks)
        enabled = bool(DataProtoConfig.auto_padding) if auto_padding is None else auto_padding
        shared = Padding() if padding is None else padding
        return [self._of(_Chunk(self._node, i, chunks, shared, enabled)) for i in range(chunks)], shared

    def without_padding(self, padding: Padding) -> DataProtoFuture:
        """The same batch without the rows that padding had added to the arguments of the call that made it.

        Parameters
        ----------
        padding : Padding
            How the arguments were cut; one entry per part of this batch.
        """
        if not isinstance(self._node, _Source):
            raise DataProtoError("only the direct result of a call can have its padding removed")
        return self._of(_Source(self._node.futures, padding))

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """Batches one after the other. No data move, and nothing is waited for."""
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
        return DataProtoFuture._of(_Concat(tuple(item._node for item in data)))

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
        """
        client = self._client
        try:
            parts = client.sync(self._fetch, client, callback_timeout=timeout)
        except TimeoutError as error:
            if isinstance(error, RankTimeoutError):
                raise
            raise self._timeout_error(timeout or 0.0) from error
        return _join(parts)

    def result(self, timeout: float | None = None) -> Any:
        """Same as :meth:`get`."""
        return self.get(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._get_async().__await__()

    async def _get_async(self) -> Any:
        client = self._client
        loop = client_loop(client)
        if loop is asyncio.get_running_loop():
            return _join(await self._fetch(client))
        return _join(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._fetch(client), loop)))

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

    async def _fetch(self, client: Client) -> list[Packed]:
        parts = await plan_reference(client, self)
        routes = {str(f.key): info.route for f in self.futures if (info := info_of(f)) is not None}
        default = "direct" if client.direct_to_workers else "scheduler"
        return list(await asyncio.gather(*(_fetch_part(client, part, routes.get(part[0], default)) for part in parts)))


def _check_count(chunks: int) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ChunkError(f"the number of chunks must be an int of at least 1, got {chunks!r}")


def _join(parts: Sequence[Packed]) -> Any:
    # A single part too: joining is what turns the metrics of ranks into lists.
    return BatchData([unpack(part) for part in parts]).concat()


async def _fetch_part(client: Client, part: Sequence[Any], route: str) -> Packed:
    key, address, start, stop, origin, rank = part
    tried: set[str] = set()
    for _ in range(2):
        try:
            answer = await call_host(client, address, "fetch", route=route, key=key, start=start, stop=stop)
        except OSError:
            answer = {"missing": True}
        if "value" in answer:
            packed = decode(answer["value"])
            return packed.copied() if address.startswith("inproc://") else packed
        if "error" in answer:
            raise ChunkLostError(
                f"{origin} cannot be sent by its host {address}: {answer['error']}", "", key, rank, address
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
        key,
        rank,
        address,
    )


# A part of a plan, as it travels: key, address, first row or None for the whole value, last row, origin, rank.
Part = tuple[str, str, int | None, int | None, str, int]


async def plan_reference(client: Client, reference: Future[Any] | DataProtoFuture) -> list[Part]:
    """Where the data that ``reference`` stands for lie: which rows, of which keys, on which hosts.

    Waits until the data exist. Runs on the client's event loop; only lengths and addresses travel.
    """
    if isinstance(reference, Future):
        await wait_done(reference)
        address, origin, rank, _ = await _facts(client, reference, need_rows=False)
        return [(str(reference.key), address, None, None, origin, rank)]
    futures = reference.futures
    await asyncio.gather(*(wait_done(future) for future in futures))
    facts = dict(
        zip(
            (str(future.key) for future in futures),
            await asyncio.gather(*(_facts(client, future, need_rows=True) for future in futures)),
            strict=True,
        )
    )
    rows = {key: fact[3] or 0 for key, fact in facts.items()}
    plan: list[Part] = []
    for segment in _tidied(reference._node.segments(rows)):
        address, origin, rank, _ = facts[segment.key]
        plan.append((segment.key, address, segment.start, segment.stop, origin, rank))
    return plan


def _tidied(segments: Sequence[Segment]) -> list[Segment]:
    """The same rows in as few segments as possible. Each key stays: also a part without rows has its ``meta_info``."""
    out: list[Segment] = []
    with_rows = {segment.key for segment in segments if segment.rows}
    hollow: set[str] = set()
    for segment in segments:
        if not segment.rows:
            if segment.key in with_rows or segment.key in hollow:
                continue
            hollow.add(segment.key)
        elif out and out[-1].key == segment.key and out[-1].stop == segment.start:
            out[-1] = Segment(segment.key, out[-1].start, segment.stop)
            continue
        out.append(segment)
    return out


async def _facts(client: Client, future: Future[Any], need_rows: bool) -> tuple[str, str, int, int | None]:
    key = str(future.key)
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
        raise ChunkLostError(f"{origin} are gone: no host has them. They were released or lost", "", key)
    address = holders[0]
    # Makes sure that the host can be asked for rows: it may never have met this package.
    answer = await client._run(install_service, workers=[address], on_error="return")
    if isinstance(answer.get(address), BaseException):
        raise ChunkLostError(
            f"{origin} lie on host {address}, which cannot serve them: {answer[address]}", "", key, -1, address
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
