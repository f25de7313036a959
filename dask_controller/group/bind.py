"""From a class with marked methods to the methods of a group.

Owns the checks that can be made before any rank exists: unknown modes, names that collide with the group's own,
roles that collide with each other. Pure functions over classes.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dask_controller.dispatch.functions import collect_dp_compute, collect_dp_compute_data_proto
from dask_controller.dispatch.register import RegisteredSpec, registered_methods
from dask_controller.dispatch.registry import ResolvedMode, resolve
from dask_controller.errors import NotRegisteredError, RegistrationError

__all__ = ["BoundMethod", "bind_class", "missing_method"]


@dataclass(frozen=True)
class BoundMethod:
    """How a group carries out one of its methods."""

    name: str
    #: Name on the rank; ``role.method`` for a colocated role.
    remote_name: str
    mode: ResolvedMode
    blocking: bool
    materialize_futures: bool
    doc: str | None = None
    signature: inspect.Signature | None = None


def bind_class(cls: type, reserved: Collection[str], role: str | None = None) -> dict[str, BoundMethod]:
    """Everything a group offers for the marked methods of ``cls``.

    Parameters
    ----------
    cls : type
        The rank's class.
    reserved : collection of str
        Names that the group itself uses.
    role : str, optional
        The role of ``cls`` in a colocated class.

    Raises
    ------
    RegistrationError
        A marked method has a name of the group's own, or a mode that nobody registered.
    """
    bound: dict[str, BoundMethod] = {}
    for name, spec in registered_methods(cls).items():
        if name in reserved and not name.startswith("_query_"):
            raise RegistrationError(
                f"{cls.__name__}.{name} is marked with @register, but groups have a member {name!r} of their own; "
                "rename the method"
            )
        function = inspect.getattr_static(cls, name, None)
        bound[name] = _bind(name, name if role is None else f"{role}.{name}", spec, function, cls)
    return bound


def _bind(name: str, remote_name: str, spec: RegisteredSpec, function: Any, cls: type) -> BoundMethod:
    try:
        resolved = resolve(spec)
    except RegistrationError as error:
        raise RegistrationError(f"{cls.__name__}.{name}: {error}") from error
    if resolved.is_rank_zero and resolved.collect_fn in (collect_dp_compute, collect_dp_compute_data_proto):
        raise RegistrationError(
            f"{cls.__name__}.{name} splits its arguments over all ranks but runs on rank 0 only, so most rows would be "
            "dropped; use execute_mode=Execute.ALL, or Dispatch.RANK_ZERO to give rank 0 the whole batch"
        )
    try:
        signature = inspect.signature(function) if callable(function) else None
    except (TypeError, ValueError):
        signature = None
    return BoundMethod(
        name=name,
        remote_name=remote_name,
        mode=resolved,
        blocking=spec.blocking,
        materialize_futures=spec.materialize_futures,
        doc=getattr(function, "__doc__", None),
        signature=signature,
    )


def missing_method(group: str, cls: type, name: str, known: Collection[str]) -> AttributeError:
    """The error for a name that the group does not have: unmarked, misspelt, or unknown."""
    target = inspect.getattr_static(cls, name, None)
    if callable(target):
        return NotRegisteredError(
            f"{cls.__name__}.{name} is not marked for groups. Put @register(dispatch_mode=...) above it, or call it on "
            f"every rank with group.execute_all_sync({name!r}, ...)"
        )
    near = difflib.get_close_matches(name, sorted(known), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return AttributeError(f"group {group!r} of {cls.__name__} has no member {name!r}{hint}")
