"""Exceptions as data.

A rank never lets an exception of user code escape raw: one that cannot be pickled would leave the caller waiting
for ever. It travels as type name, text and traceback, with the original object where that can be pickled.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from dask_controller.errors import RemoteError

__all__ = ["describe_failure", "restore_failure"]

#: An exception whose pickle is larger than this travels as text only, so that an error cannot move a batch.
_MAX_PICKLE_BYTES = 1 << 20
_MAX_TEXT = 100_000


def describe_failure(error: BaseException, skip_file: str = "") -> dict[str, Any]:
    """Turn ``error`` into plain values that always pickle.

    Parameters
    ----------
    error : BaseException
        What user code raised.
    skip_file : str
        A module of this package whose frames at the top of the traceback do not help the reader.
    """
    kind = type(error)
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == skip_file:
        tb = tb.tb_next
    try:
        text = str(error)
    except BaseException as broken:
        text = f"<str() of the exception raised {type(broken).__name__}>"
    try:
        trace = "".join(traceback.format_exception(kind, error, tb))
    except Exception:
        trace = "".join(traceback.format_tb(tb))
    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)
        raw = pickled if len(pickled) <= _MAX_PICKLE_BYTES else None
    except BaseException:
        raw = None
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "text": text[:_MAX_TEXT],
        "traceback": _shorten(trace),
        "pickle": raw,
    }


def _shorten(trace: str) -> str:
    """Both ends of a long text: the frames stand at its start, the message at its end."""
    half = _MAX_TEXT // 2
    return trace if len(trace) <= _MAX_TEXT else f"{trace[:half]}\n[...]\n{trace[-half:]}"


def restore_failure(description: dict[str, Any]) -> BaseException:
    """The exception that :func:`describe_failure` described.

    The original where it can be unpickled and printed here, with the rank's own traceback as its cause; otherwise a
    :class:`~dask_controller.errors.RemoteError` with the same facts.
    """
    remote = RemoteError(description["type"], description["text"], description["traceback"])
    if description.get("pickle") is None:
        return remote
    try:
        error = pickle.loads(description["pickle"])
        # Whoever reports the error asks for its text; one that cannot give it is no use as itself.
        str(error)
    except BaseException:
        return remote
    if not isinstance(error, BaseException):
        return remote
    if error.__cause__ is None:
        error.__cause__ = remote
    return error
