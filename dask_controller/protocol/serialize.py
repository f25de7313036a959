"""Values as bytes: one small header plus raw buffers, and the registration of that form with Dask.

Owns :class:`Packed`, :func:`pack`, :func:`unpack` and the ``dask_serialize`` entries. It does not decide what is sent
where. Which bytes stand for a tensor or an array is decided in :mod:`~dask_controller.protocol.reducers`.

The header is one version byte and one pickle-5 stream. Large buffers stand beside it as frames that alias the memory
of the packed values: nothing is copied on the way in, and what comes out is a writable view over the received frames.

Object columns of strings stay in the pickle stream. An Arrow array or a joined buffer was tried (100,000 strings of
36 characters, ms to pack + unpack): pickle 28 + 15, joined UTF-8 with lengths 20 + 79, pyarrow 23 + 8 (457 + 8 with
its first import); and pickle alone sends an object that occurs many times once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
from dask.sizeof import sizeof
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from tensordict import TensorDict

from dask_controller.errors import UnsupportedTypeError, WireFormatError
from dask_controller.protocol import reducers

__all__ = ["FORMAT_VERSION", "Packed", "pack", "register_with_dask", "unpack"]

#: First byte of every header. Raise it when an older reader would misread the stream.
FORMAT_VERSION = 1
_VERSION_BYTE = bytes([FORMAT_VERSION])
_PROTOCOL = 5

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class Packed:
    """A value as bytes that can be sent, stored and forwarded without being looked into.

    Parameters
    ----------
    header : bytes
        Version byte and pickle-5 stream.
    frames : sequence of buffers
        Raw out-of-band buffers, in the order of the stream. They alias the memory of the packed value.
    refs : sequence of objects
        What ``is_ref`` picked out while packing. They are never sent; resolve them and hand the values to
        :func:`unpack`.
    """

    __slots__ = ("frames", "header", "refs")

    def __init__(self, header: bytes, frames: Sequence[Any] = (), refs: Sequence[object] = ()) -> None:
        self.header = header
        self.frames: list[Any] = list(frames)
        self.refs: list[object] = list(refs)

    @property
    def nbytes(self) -> int:
        """Bytes of the header and all frames."""
        return len(self.header) + sum(memoryview(frame).nbytes for frame in self.frames)

    def copied(self) -> Packed:
        """Return a Packed with frames of its own, for a receiver that shares memory with the sender."""
        return Packed(self.header, [bytearray(frame) for frame in self.frames], self.refs)

    def __repr__(self) -> str:
        return f"<Packed: {self.nbytes} bytes, {len(self.frames)} frames, {len(self.refs)} refs>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        frames: list[Any]
        if protocol >= _PROTOCOL:
            frames = [pickle.PickleBuffer(frame) for frame in self.frames]
        else:
            frames = [bytes(frame) for frame in self.frames]
        return Packed, (self.header, frames)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that asks our reducers first, then cloudpickle's (functions and classes of ``__main__`` by value)."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = reducers.reduce_value(obj)
        return super().reducer_override(obj) if reduced is None else reduced


class _RefPickler(_Pickler):
    """As above, with the objects that ``is_ref`` picks replaced by their index.

    ``reducer_override`` stands in for ``persistent_id``: the latter is called for every string and number of the
    value (100,000 Python calls for a column of as many names), the former only for what could be a reference.
    """

    is_ref: Callable[[object], bool]
    refs: list[object]
    seen: dict[int, int]

    def reducer_override(self, obj: Any) -> Any:
        if self.is_ref(obj):
            index = self.seen.get(id(obj))
            if index is None:
                index = self.seen[id(obj)] = len(self.refs)
                self.refs.append(obj)
            return _resolve_ref, (index,)
        return super().reducer_override(obj)


def _resolve_ref(index: int) -> Any:
    raise WireFormatError(f"The bytes refer to value {index}, but no values were given; pass them as `refs`.")


class _Unpickler(pickle.Unpickler):
    refs: Sequence[object]

    def find_class(self, module: str, name: str) -> Any:
        if name == "_resolve_ref" and module == __name__:
            return self._take_ref
        return super().find_class(module, name)

    def _take_ref(self, index: int) -> Any:
        if not 0 <= index < len(self.refs):
            raise WireFormatError(f"The bytes refer to value {index}, but {len(self.refs)} values were given as refs.")
        return self.refs[index]


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether plain pickle does the same as ours and no reference can hide in ``value`` (small builtins only)."""
    cls = type(value)
    if cls in _PLAIN:
        return True
    if depth == 0 or cls not in (tuple, list, dict) or len(value) > 16:
        return False
    if cls is dict:
        return all(type(key) in _PLAIN and _is_plain(item, depth - 1) for key, item in value.items())
    return all(_is_plain(item, depth - 1) for item in value)


def pack(value: Any, *, is_ref: Callable[[object], bool] | None = None) -> Packed:
    """Turn any value into bytes without copying its large buffers.

    Parameters
    ----------
    value : object
        What to send. Tensors of every dtype and layout that has portable bytes, TensorDict, DataProto, numpy arrays,
        and whatever cloudpickle can pickle; nested in any way. CUDA tensors are copied to the CPU and arrive there.
    is_ref : callable, optional
        Asked about every object that is not a number, a string or a builtin container. Where it returns true the
        object is left out: its place is taken by the matching entry of ``refs`` in :func:`unpack`.

    Returns
    -------
    Packed
        Its frames alias ``value``: a later write into ``value`` shows in them. See :meth:`Packed.copied`.

    Raises
    ------
    UnsupportedTypeError
        Something in ``value`` cannot be turned into bytes. The message names where it stands and why.

    Notes
    -----
    A tensor costs the bytes it shows: a view does not carry its storage, an expanded tensor is written out in full.
    Sharing of storage between different tensors is lost; the same tensor object twice stays one. ``requires_grad``
    is kept, autograd history is not.

    Examples
    --------
    >>> unpack(pack({"x": 1}))
    {'x': 1}
    """
    try:
        if _is_plain(value):
            return Packed(_VERSION_BYTE + pickle.dumps(value, protocol=_PROTOCOL))
        return _dump(value, is_ref)
    except MemoryError:  # says nothing about the value, and looking for a culprit would need more of it
        raise
    except Exception as error:
        path, culprit, cause = _blame(value, error, is_ref)
        raise UnsupportedTypeError(
            f"{path or 'The value'} ({_type_name(culprit)}) cannot be sent: {_reason(cause)}. "
            "Send plain data, tensors or arrays instead, or build the object on the rank."
        ) from cause


def _dump(value: Any, is_ref: Callable[[object], bool] | None) -> Packed:
    out = io.BytesIO()
    out.write(_VERSION_BYTE)
    buffers: list[pickle.PickleBuffer] = []
    refs: list[object] = []
    if is_ref is None:
        pickler = _Pickler(out, protocol=_PROTOCOL, buffer_callback=buffers.append)
    else:
        pickler = _RefPickler(out, protocol=_PROTOCOL, buffer_callback=buffers.append)
        pickler.is_ref, pickler.refs, pickler.seen = is_ref, refs, {}
    pickler.dump(value)
    return Packed(out.getvalue(), [buffer.raw() for buffer in buffers], refs)


def unpack(packed: Packed, *, refs: Sequence[object] = ()) -> Any:
    """Turn bytes back into the value.

    Parameters
    ----------
    packed : Packed
        From :func:`pack`, possibly from another process.
    refs : sequence of objects
        The values for what was left out while packing, in the order of ``Packed.refs``.

    Returns
    -------
    object
        Tensors and arrays are writable views over the frames; a read-only frame is copied first.

    Raises
    ------
    WireFormatError
        The header is damaged, a frame is missing, or a newer version wrote it.
    """
    header = memoryview(packed.header)
    if header.nbytes < 2 or header[0] == 0:
        raise WireFormatError(f"A header of {header.nbytes} bytes is none of ours; the bytes are damaged or foreign.")
    if header[0] > FORMAT_VERSION:
        raise WireFormatError(
            f"The bytes are of format version {header[0]}, this side reads up to {FORMAT_VERSION}. "
            "Install the same dask_controller version on both sides."
        )
    stream = header[1:]
    try:
        if not refs:
            return pickle.loads(stream, buffers=packed.frames)
        unpickler = _Unpickler(io.BytesIO(stream), buffers=packed.frames)
        unpickler.refs = refs
        return unpickler.load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise WireFormatError(
            f"The bytes cannot be read ({error}): a header of {header.nbytes} bytes with {len(packed.frames)} frames "
            "is damaged or incomplete."
        ) from error


# --- naming the culprit ------------------------------------------------------------------------------------------


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _reason(error: BaseException) -> str:
    text = str(error).rstrip(".")
    return text if isinstance(error, UnsupportedTypeError) else f"{type(error).__name__}: {text}"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Parts of a value with the words that lead to them, for error messages only."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            yield from ((f"[{index}]", item) for index, item in enumerate(value.tolist()))
    elif isinstance(value, TensorDict):
        yield from ((f"[{key!r}]", item) for key, item in value._tensordict.items())
    elif getattr(value, "__closure__", None):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__, strict=True):
            try:
                yield f".<closure {name}>", cell.cell_contents
            except ValueError:  # an empty cell
                continue
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def _blame(value: Any, error: Exception, is_ref: Callable[[object], bool] | None) -> tuple[str, Any, Exception]:
    """Follow the failing parts down to the smallest one. Runs on failure only, so packing again is affordable."""
    path, seen = "", {id(value)}
    while True:
        for label, child in _children(value):
            if id(child) in seen or (is_ref is not None and is_ref(child)):
                continue
            try:
                _dump(child, is_ref)
            except Exception as child_error:
                path, value, error = path + label, child, child_error
                seen.add(id(child))
                break
        else:
            return path, value, error


# --- Dask --------------------------------------------------------------------------------------------------------


def _serialize_packed(packed: Packed) -> tuple[dict[str, Any], list[Any]]:
    return {}, [packed.header, *packed.frames]


def _deserialize_packed(header: dict[str, Any], frames: list[Any]) -> Packed:
    return Packed(bytes(frames[0]), frames[1:])


def _serialize_value(value: Any) -> tuple[dict[str, Any], list[Any]]:
    return _serialize_packed(pack(value))


def _deserialize_value(header: dict[str, Any], frames: list[Any]) -> Any:
    return unpack(_deserialize_packed(header, frames))


def register_with_dask(cls: type) -> None:
    """Let Dask move and spill values of ``cls`` as raw frames (:func:`pack`) instead of pickling them."""
    dask_serialize.register(cls)(_serialize_value)
    dask_deserialize.register(cls)(_deserialize_value)


dask_serialize.register(Packed)(_serialize_packed)
dask_deserialize.register(Packed)(_deserialize_packed)
register_with_dask(TensorDict)


@sizeof.register(Packed)  # type: ignore[untyped-decorator]
def _sizeof_packed(packed: Packed) -> int:
    return packed.nbytes
