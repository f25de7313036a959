"""Values that travel beside the rows: comparing them, copying their containers, joining those of many ranks.

Owns the rule by which ``meta_info`` of several batches becomes one. It knows nothing of rows.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from dask_controller.errors import KeyConflictError
from dask_controller.protocol.reducers import raw_bytes

__all__ = [
    "AUTO_PADDING_KEY",
    "RankValues",
    "copy_containers",
    "equal_values",
    "join_meta",
    "list_of_dict_to_dict_of_list",
]

#: The ``meta_info`` key that switches automatic padding on for one batch; verl uses the same.
AUTO_PADDING_KEY = "_verl_auto_padding"

_METRICS = "metrics"


class RankValues(list[Any]):
    """A number that differed between ranks: all its values, in rank order.

    A list in every way. Its type only tells :func:`join_meta` that these are values of several ranks, so that joining
    joined batches gives one flat list.
    """


# --- comparison --------------------------------------------------------------------------------------------------


def equal_values(left: Any, right: Any) -> bool:
    """Whether two values are equal as data. Never raises.

    NaN equals NaN; arrays and tensors are equal if dtype, shape and all elements are (wherever they live); containers
    if their elements are; a number equals a number of another type (``1 == 1.0``), a bool only a bool. Objects that
    define no equality of their own are compared by type and attributes.
    """
    try:
        return _equal(left, right, set())
    except Exception:  # a foreign __eq__ may raise anything; what cannot be compared is not known to be equal
        return False


def _equal(left: Any, right: Any, active: set[tuple[int, int]]) -> bool:
    if left is right:
        return True
    if isinstance(left, (torch.Tensor, np.ndarray, TensorDictBase)) or isinstance(
        right, (torch.Tensor, np.ndarray, TensorDictBase)
    ):
        return _equal_data(left, right, active)
    if isinstance(left, (bool, np.bool_)) or isinstance(right, (bool, np.bool_)):
        return isinstance(left, (bool, np.bool_)) and isinstance(right, (bool, np.bool_)) and bool(left == right)
    if isinstance(left, numbers.Number) and isinstance(right, numbers.Number):
        return bool(left == right) or (_is_nan(left) and _is_nan(right))
    if type(left) is not type(right):
        return False
    pair = (id(left), id(right))
    if pair in active:  # a cycle: equal unless something else on the way differs
        return True
    active.add(pair)
    try:
        if isinstance(left, Mapping):
            return len(left) == len(right) and all(
                key in right and _equal(item, right[key], active) for key, item in left.items()
            )
        if isinstance(left, (list, tuple)):
            return len(left) == len(right) and all(_equal(a, b, active) for a, b in zip(left, right, strict=True))
        if getattr(type(left), "__eq__", None) is object.__eq__:
            # Copies of one object that came back from two ranks are never equal by identity.
            return hasattr(left, "__dict__") and bool(vars(left)) and _equal(vars(left), vars(right), active)
        if callable(getattr(left, "equals", None)):  # pandas, pyarrow: `==` is elementwise there
            return bool(left.equals(right))
        return bool(left == right)
    finally:
        active.discard(pair)


def _is_nan(value: Any) -> bool:
    return bool(value != value)


def _equal_data(left: Any, right: Any, active: set[tuple[int, int]]) -> bool:
    if isinstance(left, TensorDictBase):
        return (
            isinstance(right, TensorDictBase)
            and left.batch_size == right.batch_size
            and set(left.keys()) == set(right.keys())
            and all(_equal(left.get(key), right.get(key), active) for key in left.keys())
        )
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and _equal_tensors(left, right)
    if not isinstance(left, np.ndarray) or not isinstance(right, np.ndarray):
        return False
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.hasobject:
        pair = (id(left), id(right))
        if pair in active:  # an array that holds itself
            return True
        active.add(pair)
        try:
            return all(_equal(a, b, active) for a, b in zip(left.flat, right.flat, strict=True))
        finally:
            active.discard(pair)
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM"))


def _equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.layout != right.layout or left.is_nested != right.is_nested:
        return False
    if left.is_nested:
        ours, theirs = left.unbind(), right.unbind()
        return len(ours) == len(theirs) and all(_equal_tensors(a, b) for a, b in zip(ours, theirs, strict=True))
    if left.shape != right.shape:
        return False
    if left.layout is not torch.strided:
        return _equal_tensors(left.to_dense(), right.to_dense())
    if left.device.type == "meta" or right.device.type == "meta":
        return left.device == right.device
    left, right = left.detach(), right.detach().to(left.device)
    try:
        if torch.equal(left, right):
            return True
        floats = left.is_floating_point() or left.is_complex()
        return floats and bool(torch.all((left == right) | ((left != left) & (right != right))))
    except (NotImplementedError, RuntimeError):  # float8 and the bit types have no comparison of their own
        if np.array_equal(raw_bytes(left), raw_bytes(right)):
            return True
        return left.is_floating_point() and left.dtype.itemsize == 1 and _equal_tensors(left.float(), right.float())


# --- copies ------------------------------------------------------------------------------------------------------


def copy_containers(value: Any) -> Any:
    """Copy dicts, lists, sets and tuples at every depth; share what they hold (tensors, arrays, objects)."""
    return _copy(value, {})


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if not isinstance(value, (dict, list, set, tuple)):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if isinstance(value, (dict, list)):
        # copy.copy keeps subclasses and their extras (a defaultdict's factory); the memo entry closes cycles.
        new = memo[id(value)] = copy.copy(value)
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new[key] = _copy(item, memo)
        return new
    if isinstance(value, set):
        return copy.copy(value)
    items = [_copy(item, memo) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


# --- joining -----------------------------------------------------------------------------------------------------


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Turn a list of dicts into a dict of lists, in order.

    Raises
    ------
    KeyConflictError
        The dicts do not all have the same keys.

    Examples
    --------
    >>> list_of_dict_to_dict_of_list([{"loss": 1}, {"loss": 2}])
    {'loss': [1, 2]}
    """
    if not list_of_dict:
        return {}
    first = list_of_dict[0]
    for index, other in enumerate(list_of_dict):
        if other.keys() != first.keys():
            missing = [key for key in first if key not in other]
            extra = [key for key in other if key not in first]
            raise KeyConflictError(
                f"Dict {index} does not have the keys of dict 0: missing {missing}, unexpected {extra}. "
                "Give every dict the same keys."
            )
    return {key: [each[key] for each in list_of_dict] for key in first}


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the ``meta_info`` of several batches, one per rank, into one dict.

    The rule, key by key (keys that only some ranks have are kept as well):

    1. ``metrics``: each rank's dict (or list of dicts) contributes one entry per name; the result is a dict of lists
       in rank order. A name that some ranks lack has the values of those that have it. None is skipped.
    2. Equal values are kept once (:func:`equal_values`).
    3. Dicts that differ are joined by these rules 2 to 5, key by key.
    4. Numbers that differ (timings, counters; Python, numpy or 0-d tensors, not bools) become a
       :class:`RankValues`: a list of the value of every rank that has the key, in rank order. Nothing is averaged or
       dropped.
    5. Anything else that differs is a conflict. The auto-padding switch is on if it is on anywhere.

    Parameters
    ----------
    metas : sequence of mapping
        One per rank, in rank order. They are not changed, and the result shares no container with them.

    Raises
    ------
    KeyConflictError
        Rule 5; names key, ranks and values.
    """
    joined: dict[str, Any] = {}
    holders: dict[str, list[tuple[int, Any]]] = {}
    for rank, meta in enumerate(metas):
        for key, value in meta.items():
            holders.setdefault(key, []).append((rank, value))
    for key, held in holders.items():
        if key == _METRICS and all(_is_metrics(value) for _, value in held):
            metrics = _join_metrics([value for _, value in held])
            if metrics:
                joined[key] = metrics
        elif key == AUTO_PADDING_KEY:
            joined[key] = any(bool(value) for _, value in held)
        else:
            joined[key] = _join_key(f"meta_info[{key!r}]", held)
    copied: dict[str, Any] = copy_containers(joined)
    return copied


def _is_metrics(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, Mapping) for item in value)
    return value is None or isinstance(value, Mapping)


def _join_metrics(values: Sequence[Any]) -> dict[Any, list[Any]]:
    joined: dict[Any, list[Any]] = {}
    for value in values:
        for each in value if isinstance(value, list) else [value or {}]:
            for name, item in each.items():
                joined.setdefault(name, []).append(item)
    return joined


def _join_key(path: str, held: list[tuple[int, Any]]) -> Any:
    first = held[0][1]
    if all(equal_values(first, value) for _, value in held[1:]):
        return first
    values = [value for _, value in held]
    if all(isinstance(value, dict) for value in values):
        inner: dict[Any, list[tuple[int, Any]]] = {}
        for rank, value in held:
            for key, item in value.items():
                inner.setdefault(key, []).append((rank, item))
        return {key: _join_key(f"{path}[{key!r}]", items) for key, items in inner.items()}
    if all(_is_number(value) or isinstance(value, RankValues) for value in values):
        flat = RankValues()
        for value in values:
            flat.extend(value if isinstance(value, RankValues) else [value])
        return flat
    raise KeyConflictError(_conflict_text(path, held))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype is not torch.bool
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iufc"
    return isinstance(value, numbers.Number) and not isinstance(value, (bool, np.bool_))


def _conflict_text(path: str, held: list[tuple[int, Any]]) -> str:
    groups: list[tuple[list[int], Any]] = []
    for rank, value in held:
        for ranks, known in groups:
            if equal_values(known, value):
                ranks.append(rank)
                break
        else:
            groups.append(([rank], value))
    lines = [f"{path} has {len(groups)} different values in the batches to join:"]
    for ranks, value in groups[:8]:
        lines.append(f"  rank{'s' * (len(ranks) > 1)} {_short_ranks(ranks)}: {short_repr(value)}")
    if len(groups) > 8:
        lines.append(f"  ... and {len(groups) - 8} more")
    lines.append(
        "Make them equal, return them from one rank only, or put them under 'metrics', which keeps one per rank."
    )
    return "\n".join(lines)


def _short_ranks(ranks: list[int]) -> str:
    head = ", ".join(map(str, ranks[:8]))
    return head if len(ranks) <= 8 else f"{head}, ... ({len(ranks)} in all)"


def short_repr(value: Any, limit: int = 120) -> str:
    """One line that says what a value is, however large or hostile its own repr."""
    if isinstance(value, torch.Tensor) and (value.is_nested or value.numel() > 8):
        return f"<tensor {tuple(value.shape) if not value.is_nested else 'jagged'} {value.dtype}>"
    if isinstance(value, np.ndarray) and value.size > 8:
        return f"<array {value.shape} {value.dtype}>"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__qualname__} whose repr fails>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
