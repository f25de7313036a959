"""A batch in a file: written as a whole or not at all, read without running code from the file.

Owns the file format. The container is ``torch.save``'s zip archive, read back with ``weights_only=True``: a
maintained loader that builds tensors, strings, numbers and builtin containers and nothing else. Into it goes a tree
of exactly those. Tensors, TensorDicts and arrays are described as on the wire
(:mod:`~dask_controller.protocol.reducers`), with their bytes as uint8 tensors, so that every dtype and layout has one
description. safetensors was the other candidate; it has no place for object columns, jagged tensors or nested values.

What only pickle can describe (user classes in an object column, say) is stored pickled, apart, and is not touched on
reading unless the caller allows it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from dask_controller.errors import UnsupportedTypeError, WireFormatError
from dask_controller.protocol import reducers
from dask_controller.protocol.data_proto import DataProto
from dask_controller.protocol.serialize import Packed, pack, unpack

__all__ = ["load", "save"]

_FORMAT = "dask_controller.DataProto"
_VERSION = 1

_SCALARS = frozenset({type(None), bool, int, float, str})

#: The functions a description may name. They make data and look nothing up.
_MAKERS: dict[str, Any] = {maker.__name__: maker for maker in reducers.PLAIN_MAKERS}


class _NeedsPickle(Exception):
    """Some part of a value has no plain description."""


def save(data: DataProto, filepath: str | os.PathLike[str]) -> None:
    """Write ``data`` to ``filepath``.

    The file appears under its name only when it is complete and on the disk: it is written beside it, flushed with
    fsync, and renamed. A file of that name stays as it is until then, also if writing fails.

    Raises
    ------
    UnsupportedTypeError
        A value cannot be described even by pickle; names it.
    OSError
        The file cannot be written.
    """
    tree = {
        "format": _FORMAT,
        "version": _VERSION,
        "batch": _encode_or_pickle(data.batch),
        "non_tensor_batch": [(key, _encode_or_pickle(column)) for key, column in data.non_tensor_batch.items()],
        "meta_info": [(_encode_or_pickle(key), _encode_or_pickle(value)) for key, value in data.meta_info.items()],
    }
    target = Path(filepath)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync a directory
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def load(filepath: str | os.PathLike[str], *, allow_pickle: bool = False) -> DataProto:
    """Read what :func:`save` wrote.

    Parameters
    ----------
    filepath : path
        The file.
    allow_pickle : bool
        Also read parts that were stored pickled. That runs whatever code the file asks for: only for files you trust.

    Returns
    -------
    DataProto
        Tensors on the CPU.

    Raises
    ------
    UnsupportedTypeError
        The file has pickled parts and ``allow_pickle`` is false; names them.
    WireFormatError
        The file is none of ours, damaged, or of a newer version.
    """
    with open(filepath, "rb") as file:
        # Asked first: torch.load would take a bare pickle for one of its own old files.
        if not zipfile.is_zipfile(file):
            raise WireFormatError(f"{os.fspath(filepath)!r} is no file of DataProto.save_to_disk, or it is damaged.")
        file.seek(0)
        try:
            tree = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise WireFormatError(
                f"{os.fspath(filepath)!r} is no file of DataProto.save_to_disk, or it is damaged: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise WireFormatError(f"{os.fspath(filepath)!r} was not written by DataProto.save_to_disk.")
    if tree["version"] > _VERSION:
        raise WireFormatError(
            f"{os.fspath(filepath)!r} has format version {tree['version']}, this dask_controller reads up to "
            f"{_VERSION}."
        )
    entries = [("batch", tree["batch"])]
    entries += [(f"non_tensor_batch[{key!r}]", node) for key, node in tree["non_tensor_batch"]]
    entries += [(f"meta_info[{key!r}]", node) for key, node in tree["meta_info"]]
    pickled = [path for path, node in entries if _is_pickled(node)]
    if pickled and not allow_pickle:
        raise UnsupportedTypeError(
            f"{', '.join(pickled)} of {os.fspath(filepath)!r} can only be read with pickle, which runs code from the "
            "file. Pass allow_pickle=True if you trust it."
        )
    return DataProto(
        batch=_decode(tree["batch"]),
        non_tensor_batch={key: _decode(node) for key, node in tree["non_tensor_batch"]},
        meta_info={_decode(key): _decode(node) for key, node in tree["meta_info"]},
    )


# --- the tree: scalars as they are, everything else a tuple whose first entry says what it is ---------------------


def _encode_or_pickle(value: Any) -> Any:
    try:
        return _encode(value, frozenset())
    except (_NeedsPickle, RecursionError):
        packed = pack(value)
        return ("pickle", _bytes_tensor(packed.header), [_bytes_tensor(frame) for frame in packed.frames])


def _is_pickled(node: Any) -> bool:
    return isinstance(node, tuple) and bool(node) and node[0] == "pickle"


def _bytes_tensor(buffer: Any) -> torch.Tensor:
    view = memoryview(buffer)
    return torch.frombuffer(bytearray(view), dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _encode(value: Any, inside: frozenset[int]) -> Any:
    cls = type(value)
    if cls in _SCALARS:
        return value
    if id(value) in inside:
        raise _NeedsPickle  # a cycle has no tree
    inside = inside | {id(value)}
    if cls in (list, tuple, set, frozenset):
        return (cls.__name__, [_encode(item, inside) for item in value])
    if cls is dict:
        return ("dict", [(_encode(key, inside), _encode(item, inside)) for key, item in value.items()])
    if cls in (bytes, bytearray):
        return (cls.__name__, _bytes_tensor(value))
    if cls is complex:
        return ("complex", value.real, value.imag)
    if cls is torch.Size:
        return ("tuple", list(value))
    if isinstance(value, np.generic):
        return ("scalar", _encode(np.asarray(value), inside))
    if isinstance(value, np.dtype):
        return ("dtype", _encode(np.lib.format.dtype_to_descr(value), inside))
    if cls is np.ndarray and value.dtype == object:
        return ("objects", list(value.shape), [_encode(item, inside) for item in value.ravel().tolist()])
    if isinstance(value, pickle.PickleBuffer):
        array = np.frombuffer(value.raw(), dtype=np.uint8)
        return ("buffer", torch.from_numpy(array if array.flags.writeable else array.copy()))
    if isinstance(value, NonTensorStack):
        return ("stack", [_encode(item, inside) for item in value.tensordicts], list(value.batch_size))
    if isinstance(value, NonTensorData):
        return ("single", _encode(value.data, inside), list(value.batch_size))
    reduced = reducers.reduce_value(value)
    if reduced is None or reduced[0].__name__ not in _MAKERS:
        raise _NeedsPickle
    return ("make", reduced[0].__name__, [_encode(argument, inside) for argument in reduced[1]])


def _decode(node: Any) -> Any:
    if not isinstance(node, tuple):
        return node
    kind = node[0]
    if kind in _BUILTINS:
        return _BUILTINS[kind](_decode(item) for item in node[1])
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in node[1]}
    if kind in ("bytes", "bytearray"):
        raw = node[1].numpy().tobytes()
        return raw if kind == "bytes" else bytearray(raw)
    if kind == "complex":
        return complex(node[1], node[2])
    if kind == "scalar":
        return _decode(node[1])[()]
    if kind == "dtype":
        return np.lib.format.descr_to_dtype(_decode(node[1]))
    if kind == "objects":
        flat = np.fromiter((_decode(item) for item in node[2]), dtype=object, count=len(node[2]))
        return flat.reshape(node[1])
    if kind == "buffer":
        return node[1].numpy()
    if kind == "stack":
        elements = [_decode(item) for item in node[1]] or [NonTensorData(None)]
        return NonTensorStack(*elements)[: len(node[1])]
    if kind == "single":
        return NonTensorData(_decode(node[1]), batch_size=node[2])
    if kind == "make" and node[1] in _MAKERS:
        return _MAKERS[node[1]](*[_decode(argument) for argument in node[2]])
    if kind == "pickle":
        return unpack(Packed(node[1].numpy().tobytes(), [frame.numpy() for frame in node[2]]))
    raise WireFormatError(f"The file holds an entry of unknown kind {kind!r}; it is damaged or of a newer version.")


_BUILTINS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
