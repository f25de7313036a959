"""How one call is carried out, wherever the user's object lives.

Owns the user's object: builds it, finds the method, unpacks arguments, packs the result or describes the failure.
Knows nothing of Dask, threads or processes, so that every executor can use it. Nothing that user code raises,
``SystemExit`` and ``KeyboardInterrupt`` included, gets out of it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_controller.protocol.plan import assemble
from dask_controller.protocol.serialize import Packed, pack, unpack
from dask_controller.worker.context import RankContext, enter_context
from dask_controller.worker.failure import describe_failure

__all__ = ["CONSTRUCT", "Outcome", "ResolvedRef", "Runner", "Work"]

#: The method name that builds the user's object.
CONSTRUCT = "__init__"


@dataclass(frozen=True)
class ResolvedRef:
    """Data that a call refers to, brought to this host: pieces in row order, packed or as objects."""

    #: Pieces, and the order of their rows as the bytes of an int64 array.
    strands: tuple[tuple[tuple[Any, ...], bytes | None], ...]
    #: The pieces are rows of a batch, to be joined also where there is one; else there is one, the value itself.
    is_batch: bool = False

    def value(self) -> Any:
        strands = [
            (
                [unpack(piece) if isinstance(piece, Packed) else piece for piece in pieces],
                None if order is None else np.frombuffer(order, dtype=np.int64),
            )
            for pieces, order in self.strands
        ]
        return assemble(strands) if self.is_batch else strands[0][0][0]


@dataclass
class Work:
    """One call on its way through a rank."""

    call_id: int
    method: str
    #: Packed values, shared by position between arguments.
    values: Sequence[Packed]
    #: For each value, the data its placeholders stand for.
    refs: Sequence[Sequence[ResolvedRef]]
    #: Positions in ``values`` of the positional and keyword arguments.
    args: Sequence[int]
    kwargs: Mapping[str, int]
    #: ``"send"`` the result, ``"keep"`` it here under a key, or ``"drop"`` it.
    out: str
    #: The buffers of ``values`` belong to somebody else who may write to them.
    borrowed: bool = False
    context: RankContext | None = None
    #: Called once with the outcome, from the thread that ran the method.
    reply: Callable[[Outcome], None] = field(default=lambda outcome: None)


@dataclass(frozen=True)
class Outcome:
    """What became of a call. Exactly one of the three groups of fields is set."""

    #: The packed result, for ``out="send"``.
    packed: Packed | None = None
    #: The result itself, for ``out="keep"``.
    kept: Any = None
    is_kept: bool = False
    #: What :func:`~dask_controller.worker.failure.describe_failure` made of the exception.
    failure: dict[str, Any] | None = None


class Runner:
    """Holds the user's object of one rank and runs calls on it."""

    def __init__(self) -> None:
        self.target: Any = None

    def is_async(self, method: str) -> bool:
        """Whether ``method`` is a coroutine function."""
        if self.target is None:
            return False
        try:
            owner, name = self._owner(method)
        except AttributeError:
            return False
        return inspect.iscoroutinefunction(getattr(owner, name, None))

    def run(self, work: Work) -> Outcome:
        """Carry out a call to a plain method, or to :data:`CONSTRUCT`."""
        try:
            enter_context(work.context)
            args, kwargs = self._arguments(work)
            if work.method == CONSTRUCT:
                self.target = _build(*args)
                return _finish(None, work.out)
            return _finish(self._bound(work.method)(*args, **kwargs), work.out)
        except BaseException as error:
            return Outcome(failure=describe_failure(error, skip_file=__file__))

    async def run_async(self, work: Work) -> Outcome:
        """Carry out a call to a coroutine method."""
        try:
            enter_context(work.context)
            args, kwargs = self._arguments(work)
            return _finish(await self._bound(work.method)(*args, **kwargs), work.out)
        except asyncio.CancelledError as error:
            return Outcome(failure=describe_failure(error, skip_file=__file__))
        except BaseException as error:
            return Outcome(failure=describe_failure(error, skip_file=__file__))

    def _bound(self, method: str) -> Callable[..., Any]:
        if self.target is None:
            raise RuntimeError("the rank has no object: its __init__ has not succeeded")
        target, name = self._owner(method)
        bound = getattr(target, name, None)
        if not callable(bound):
            raise AttributeError(f"{type(target).__name__} has no method {name!r}")
        return bound  # type: ignore[no-any-return]

    def _owner(self, method: str) -> tuple[Any, str]:
        """The object that has ``method``: a colocated role for ``role.method``."""
        role, _, name = method.rpartition(".")
        if not role:
            return self.target, name
        roles = getattr(self.target, "fused_worker_dict", {})
        if role not in roles:
            raise AttributeError(
                f"{type(self.target).__name__} has no role {role!r} on this rank (roles: {sorted(roles) or 'none'}). "
                "If it defines __init__, that must call super().__init__()"
            )
        return roles[role], name

    @staticmethod
    def _arguments(work: Work) -> tuple[list[Any], dict[str, Any]]:
        unpacked: dict[int, Any] = {}

        def value(position: int) -> Any:
            if position not in unpacked:
                packed = work.values[position]
                if work.borrowed:
                    packed = packed.copied()
                refs = [ref.value() for ref in work.refs[position]]
                try:
                    unpacked[position] = unpack(packed, refs=refs)
                except ModuleNotFoundError as error:
                    raise _not_importable(error) from error
            return unpacked[position]

        return [value(i) for i in work.args], {name: value(i) for name, i in work.kwargs.items()}


def _not_importable(error: ModuleNotFoundError) -> ModuleNotFoundError:
    name = error.name or "the module"
    return ModuleNotFoundError(
        f"{name!r} cannot be imported on the rank's host, and a value of the call needs it. Install it in the "
        f"environment of the Dask workers, send the file with client.upload_file(), or send its classes by value: "
        f"cloudpickle.register_pickle_by_value({name.partition('.')[0]})",
        name=error.name,
        path=error.path,
    )


def _build(cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return cls(*args, **kwargs)


def _finish(result: Any, out: str) -> Outcome:
    if out == "drop":
        return Outcome()
    # Packing costs next to nothing (tensors are not copied) and finds out here, where the error has a rank and a
    # method, whether the result can travel at all.
    packed = pack(result)
    if out == "keep":
        return Outcome(kept=result, is_kept=True)
    return Outcome(packed=packed)
