"""Merging columns of two batches that hold the same rows. Owns what counts as agreement; changes no input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from dask_controller.errors import BatchMismatchError, KeyConflictError, UnsupportedTypeError
from dask_controller.protocol.meta import AUTO_PADDING_KEY, equal_values, short_repr

__all__ = ["union_meta", "union_numpy_dict", "union_tensor_dict"]


def _check_equal(what: str, key: Any, ours: Any, theirs: Any) -> None:
    if not equal_values(ours, theirs):
        raise KeyConflictError(
            f"{what} {key!r} is on both sides with different values: {short_repr(ours)} and {short_repr(theirs)}. "
            "Rename or pop it on one side."
        )


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Return a TensorDict with the entries of both; tensors are shared, neither input changes.

    Raises
    ------
    BatchMismatchError
        The batch sizes differ; names both.
    KeyConflictError
        An entry is on both sides with different values (NaN equals NaN).
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchMismatchError(
            f"union needs batches of one size, got {tuple(tensor_dict1.batch_size)} and "
            f"{tuple(tensor_dict2.batch_size)}."
        )
    merged = tensor_dict1.copy()
    for key in tensor_dict2.keys():
        theirs = tensor_dict2.get(key)
        if key in tensor_dict1.keys():
            _check_equal("Tensor", key, tensor_dict1.get(key), theirs)
        else:
            merged.set(key, theirs)
    return merged


def union_numpy_dict(
    tensor_dict1: Mapping[str, np.ndarray[Any, Any]], tensor_dict2: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return a dict with the arrays of both; neither input changes.

    Raises
    ------
    KeyConflictError
        An array is on both sides with different values (NaN equals NaN, also inside objects).
    """
    merged = dict(tensor_dict1)
    for key, theirs in tensor_dict2.items():
        if key not in merged:
            merged[key] = theirs
            continue
        for side in (merged[key], theirs):
            if not isinstance(side, np.ndarray):
                raise UnsupportedTypeError(f"Column {key!r} must be a numpy array, got {type(side).__name__}.")
        _check_equal("Column", key, merged[key], theirs)
    return merged


def union_meta(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the entries of both; what both have must be equal."""
    merged = dict(ours)
    for key, value in theirs.items():
        if key == AUTO_PADDING_KEY:
            merged[key] = bool(value) or bool(ours.get(key))
        elif key in merged:
            _check_equal("meta_info", key, merged[key], value)
        else:
            merged[key] = value
    return merged
