"""Which functions stand behind a mode, the built-in ones and those that users add.

Owns the two tables. A group looks its methods up here once, when it is built (:func:`resolve`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from dask_controller.dispatch import functions, mesh
from dask_controller.dispatch._types import CollectFn, DispatchFn, DispatchPair
from dask_controller.dispatch.modes import Dispatch, Execute
from dask_controller.dispatch.register import RegisteredSpec
from dask_controller.errors import DuplicateModeError, RegistrationError, UnknownModeError

__all__ = [
    "ExecuteEntry",
    "ResolvedMode",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "register_dispatch_mode",
    "resolve",
    "update_dispatch_mode",
]


class ExecuteEntry(TypedDict):
    """What stands behind an execution mode."""

    execute_fn_name: str


@dataclass(frozen=True)
class ResolvedMode:
    """All that a group needs to know to bind one method."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    #: Name of the group's method that runs the call: ``"execute_all"`` or ``"execute_rank_zero"``.
    execute_fn_name: str

    @property
    def is_rank_zero(self) -> bool:
        """Whether only rank 0 is called."""
        return self.execute_fn_name == "execute_rank_zero"

    @property
    def is_pass_through(self) -> bool:
        """Whether arguments go to every rank as they are, and not as lists with one element per rank."""
        return self.dispatch_fn is functions.dispatch_all_to_all

    @property
    def collect_mask(self) -> Callable[[Any], list[bool]] | None:
        """What tells, given the group, which ranks' results are needed; None if all are."""
        return getattr(self.collect_fn, "collect_mask", None)


# Weak keys: a member that was removed takes its functions along, once nobody holds it any more.
_dispatch_table: weakref.WeakKeyDictionary[Dispatch, tuple[DispatchFn, CollectFn]] = weakref.WeakKeyDictionary(
    {
        Dispatch.RANK_ZERO: (functions.dispatch_rank_zero, functions.collect_rank_zero),
        Dispatch.ONE_TO_ALL: (functions.dispatch_one_to_all, functions.collect_all_to_all),
        Dispatch.ALL_TO_ALL: (functions.dispatch_all_to_all, functions.collect_all_to_all),
        Dispatch.DP_COMPUTE: (functions.dispatch_dp_compute, functions.collect_dp_compute),
        Dispatch.DP_COMPUTE_PROTO: (
            functions.dispatch_dp_compute_data_proto,
            functions.collect_dp_compute_data_proto,
        ),
        Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: (
            functions.dispatch_dp_compute_data_proto_with_func,
            functions.collect_dp_compute_data_proto,
        ),
        Dispatch.DP_COMPUTE_METRIC: (functions.dispatch_dp_compute_data_proto, functions.collect_dp_compute),
        Dispatch.DIRECT_ROLLOUT_METHOD: (functions.refuse_direct_rollout, functions.refuse_direct_rollout),
    }
)

_execute_table = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}

#: verl's module, whose functions look for verl's own group and so cannot serve ours.
_VERL_MODULE = "verl.single_controller.base.decorator"


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> Dispatch:
    """Add a dispatch mode.

    Parameters
    ----------
    dispatch_mode_name : str
        Its name; upper-cased. The member becomes ``Dispatch.NAME``.
    dispatch_fn : callable
        ``dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs)``; every returned argument is a list with one
        element per rank.
    collect_fn : callable
        ``collect_fn(worker_group, output) -> result``; `output` is the list of results, one per rank.

    Returns
    -------
    Dispatch
        The new member.

    Raises
    ------
    DuplicateModeError
        The mode exists already. It is a ``ValueError``.
    RegistrationError
        A function cannot be called, or the name is no name.

    Notes
    -----
    A member that has no functions yet, because it was made by ``Dispatch.register`` or came in with a pickle, receives
    them.
    """
    _check_functions(dispatch_fn, collect_fn)
    member = Dispatch.from_name(dispatch_mode_name)
    if member is not None and member in _dispatch_table:
        raise DuplicateModeError(
            f"Dispatch.{member.name} is already registered with its functions. Replace them with update_dispatch_mode("
            f"Dispatch.{member.name}, dispatch_fn, collect_fn), or choose another name.",
            member.name,
        )
    if member is None:
        member = Dispatch.register(dispatch_mode_name)
    _dispatch_table[member] = (dispatch_fn, collect_fn)
    return member


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replace the functions of a mode. Groups that exist already keep those they were built with.

    Parameters
    ----------
    dispatch_mode : Dispatch
        A mode that has functions: a built-in one, or one made by :func:`register_dispatch_mode`.
    dispatch_fn, collect_fn : callable
        As in :func:`register_dispatch_mode`.

    Raises
    ------
    UnknownModeError
        The mode has no functions that could be replaced, or was removed.
    RegistrationError
        A function cannot be called, or `dispatch_mode` is no member of Dispatch.
    """
    _check_functions(dispatch_fn, collect_fn)
    _dispatch_functions(dispatch_mode)
    _dispatch_table[dispatch_mode] = (dispatch_fn, collect_fn)


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> DispatchPair:
    """Look up the functions of a dispatch mode.

    Returns
    -------
    dict
        ``{"dispatch_fn": ..., "collect_fn": ...}``, a copy.

    Raises
    ------
    UnknownModeError
        The mode has none, or was removed.
    RegistrationError
        `dispatch_mode` is no member of Dispatch.
    """
    dispatch_fn, collect_fn = _dispatch_functions(dispatch_mode)
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_execute_fn(execute_mode: Execute) -> ExecuteEntry:
    """Look up which method of the group runs the calls of an execution mode.

    Returns
    -------
    dict
        ``{"execute_fn_name": "execute_all"}`` or ``{"execute_fn_name": "execute_rank_zero"}``, a copy.

    Raises
    ------
    UnknownModeError
        The mode has none.
    RegistrationError
        `execute_mode` is no member of Execute.
    """
    if not isinstance(execute_mode, Execute):
        raise RegistrationError(
            f"{execute_mode!r} is no execution mode. Expected a member of Execute: {', '.join(Execute.names())}."
        )
    if execute_mode not in _execute_table:
        raise UnknownModeError(
            f"No method of a group runs the calls of Execute.{execute_mode.name}. Expected one of "
            f"{', '.join(f'Execute.{known.name}' for known in _execute_table)}.",
            execute_mode.name,
        )
    return {"execute_fn_name": _execute_table[execute_mode]}


def resolve(spec: RegisteredSpec) -> ResolvedMode:
    """Find all that a group needs to bind a method.

    Parameters
    ----------
    spec : RegisteredSpec
        The mark of the method.

    Returns
    -------
    ResolvedMode
        For ``Dispatch.RANK_ZERO`` the call runs on rank 0, whatever the mark's execution mode. Functions of verl's own
        module are replaced by ours of the same name.

    Raises
    ------
    UnknownModeError
        A mode without functions.
    """
    mode = spec.dispatch_mode
    if isinstance(mode, Mapping):
        dispatch_fn, collect_fn = _own(mode["dispatch_fn"]), _own(mode["collect_fn"])
    else:
        dispatch_fn, collect_fn = _dispatch_functions(mode)
    on_rank_zero = isinstance(mode, Dispatch) and mode.name == "RANK_ZERO"
    execute_mode = Execute.RANK_ZERO if on_rank_zero else spec.execute_mode
    return ResolvedMode(dispatch_fn, collect_fn, get_predefined_execute_fn(execute_mode)["execute_fn_name"])


def _dispatch_functions(mode: object) -> tuple[DispatchFn, CollectFn]:
    if not isinstance(mode, Dispatch):
        raise RegistrationError(
            f"{mode!r} is no dispatch mode. Expected a member of Dispatch: {', '.join(Dispatch.names())}."
        )
    if mode not in Dispatch or mode not in _dispatch_table:
        state = "has no functions" if mode in Dispatch else "is unknown: it was removed, or never registered"
        raise UnknownModeError(
            f"Dispatch.{mode.name} {state}. Expected a built-in mode, or one that this process has made with "
            f"register_dispatch_mode({mode.name!r}, dispatch_fn, collect_fn).",
            mode.name,
        )
    return _dispatch_table[mode]


def _check_functions(dispatch_fn: object, collect_fn: object) -> None:
    for name, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise RegistrationError(
                f"{name} cannot be called: expected a function, got {function!r} of type {type(function).__name__}."
            )


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Our namesake of a function of verl's module; any other function as it is."""
    if isinstance(function, functools.partial):
        inner = _own(function.func)
        if inner is function.func:
            return function
        if inner is mesh.dispatch_lazy_compute_data_proto:
            return mesh.make_nd_compute_dataproto_dispatch_fn(*function.args, **function.keywords)["dispatch_fn"]
        if inner is mesh.collect_lazy_compute_data_proto:
            # A plain partial could not tell which ranks it needs.
            return mesh.make_nd_compute_dataproto_dispatch_fn(*function.args, **function.keywords)["collect_fn"]
        return functools.partial(inner, *function.args, **function.keywords)
    if getattr(function, "__module__", None) != _VERL_MODULE:
        return function
    name = getattr(function, "__name__", "")
    for ours in (functions, mesh):
        if name in ours.__all__:
            found: Callable[..., Any] = getattr(ours, name)
            return found
    return function
