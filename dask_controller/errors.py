"""Every exception that dask_controller raises on purpose.

Each kind is also a builtin exception, so that ``except ValueError`` and kin keep working, and each keeps the
facts of the failure as fields, so that a program does not have to read the text. All of them survive plain
pickling between processes: the fields are the arguments of ``Exception.__init__`` and the text is made in
``__str__``.

The tree::

    ControllerError(Exception)
    ├─ RegistrationError(TypeError)          bad @register arguments, name collisions, unknown modes
    │  ├─ DuplicateModeError(ValueError)     a mode name that is taken
    │  ├─ ProtectedVariableError(ValueError) worker_env sets a variable of the group's
    │  └─ UnknownModeError(KeyError)         a mode that is not registered
    ├─ NotRegisteredError(AttributeError)    a method was called that no @register marks
    ├─ DataProtoError(ValueError)
    │  ├─ BatchMismatchError                 columns or batches whose lengths differ
    │  ├─ ChunkError                         a batch cannot be cut as asked
    │  ├─ KeyConflictError                   two sides disagree about a key
    │  └─ UnsupportedTypeError(TypeError)    a value that cannot be stored, split or sent
    ├─ WireFormatError(ValueError)           bytes that are not ours, or of a newer version
    ├─ DispatchError(ValueError)             arguments do not fit the dispatch mode
    ├─ PlacementError(RuntimeError)
    │  ├─ InsufficientResourcesError         fewer slots than ranks
    │  ├─ GroupStartTimeoutError(TimeoutError)
    │  └─ VersionMismatchError               controller and hosts run different code
    ├─ RankError(RuntimeError)
    │  ├─ RankFailedError                    user code raised
    │  ├─ RankLostError                      the host of a rank is gone
    │  ├─ ChunkLostError                     a piece of data is gone
    │  └─ RankTimeoutError(TimeoutError)     a rank did not answer in time
    ├─ RemoteError                           stands in for a rank's exception that could not be brought over
    └─ GroupClosedError(RuntimeError)        the group was closed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BatchMismatchError",
    "ChunkError",
    "ChunkLostError",
    "ControllerError",
    "DataProtoError",
    "DispatchError",
    "DuplicateModeError",
    "GroupClosedError",
    "GroupStartTimeoutError",
    "InsufficientResourcesError",
    "KeyConflictError",
    "NotRegisteredError",
    "PlacementError",
    "ProtectedVariableError",
    "RankError",
    "RankFailedError",
    "RankLostError",
    "RankTimeoutError",
    "RegistrationError",
    "RemoteError",
    "UnknownModeError",
    "UnsupportedTypeError",
    "VersionMismatchError",
    "WireFormatError",
]


class ControllerError(Exception):
    """Base of every exception of this package."""


class RegistrationError(ControllerError, TypeError):
    """A method, mode or class is declared in a way that cannot work."""


class ProtectedVariableError(RegistrationError, ValueError):
    """``worker_env`` sets a variable that belongs to the group."""


class DuplicateModeError(RegistrationError, ValueError):
    """A dispatch or execution mode of that name exists already.

    Parameters
    ----------
    message : str
        What happened and what to do.
    name : str
        The name that is taken.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message, name)
        self.message = message
        self.name = name

    def __str__(self) -> str:
        return self.message


class UnknownModeError(RegistrationError, KeyError):
    """No dispatch or execution mode of that name is registered.

    Parameters
    ----------
    message : str
        What happened and what to do.
    name : str
        The name that was asked for.
    near : sequence of str
        Registered names that look like it.
    """

    def __init__(self, message: str, name: str = "", near: Sequence[str] = ()) -> None:
        super().__init__(message, name, tuple(near))
        self.message = message
        self.name = name
        self.near = tuple(near)

    def __str__(self) -> str:
        return self.message


class NotRegisteredError(ControllerError, AttributeError):
    """A method was called through a group, but no ``@register`` marks it."""


class DataProtoError(ControllerError, ValueError):
    """A batch is, or would become, inconsistent."""


class BatchMismatchError(DataProtoError):
    """Columns, or whole batches, have different lengths."""


class ChunkError(DataProtoError):
    """A batch cannot be cut into the pieces that were asked for."""


class KeyConflictError(DataProtoError):
    """A key is present where it must not be, absent where it must be, or has two different values."""


class UnsupportedTypeError(DataProtoError, TypeError):
    """A value has a type that cannot be stored, split, joined or sent."""


class WireFormatError(ControllerError, ValueError):
    """Received bytes are malformed or were written by a newer version."""


class DispatchError(ControllerError, ValueError):
    """The arguments of a call do not fit its dispatch mode. No rank was called."""


class PlacementError(ControllerError, RuntimeError):
    """Ranks could not be placed on hosts."""


class InsufficientResourcesError(PlacementError):
    """Fewer slots than ranks.

    Parameters
    ----------
    message : str
        What happened and what to do.
    asked, present, free : int
        Slots asked for, offered by the cluster, and free at the end of the wait.
    held : mapping of str to str
        Host address to a description of the holder of its slot.
    """

    def __init__(
        self, message: str, asked: int = 0, present: int = 0, free: int = 0, held: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, asked, present, free, dict(held or {}))
        self.message = message
        self.asked = asked
        self.present = present
        self.free = free
        self.held = dict(held or {})

    def __str__(self) -> str:
        lines = [f"{self.message} (asked {self.asked}, present {self.present}, free {self.free})"]
        lines += [f"  {host} is held by {who}" for host, who in sorted(self.held.items())]
        return "\n".join(lines)


class GroupStartTimeoutError(PlacementError, TimeoutError):
    """A group did not come up within its time limit."""


class VersionMismatchError(PlacementError):
    """Controller and hosts run versions that cannot work together."""


class RemoteError(ControllerError):
    """Stands in for an exception of a rank that could not be brought over as itself.

    Parameters
    ----------
    type_name : str
        Qualified name of the original type, such as ``"builtins.ValueError"``.
    text : str
        ``str()`` of the original.
    traceback_text : str
        The rank's own formatted traceback.
    """

    def __init__(self, type_name: str, text: str, traceback_text: str = "") -> None:
        super().__init__(type_name, text, traceback_text)
        self.type_name = type_name
        self.text = text
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        head = f"{self.type_name}: {self.text}" if self.text else self.type_name
        return f"{head}\n\n{self.traceback_text}" if self.traceback_text else head


class RankError(ControllerError, RuntimeError):
    """Something went wrong on, or on the way to, a rank.

    Parameters
    ----------
    message : str
        What happened and what to do.
    method : str
        The method that was called, or ``""`` where there was none.
    """

    def __init__(self, message: str, method: str = "", *args: Any) -> None:
        super().__init__(message, method, *args)
        self.message = message
        self.method = method

    def __str__(self) -> str:
        return self.message


class RankFailedError(RankError):
    """User code raised on one or more ranks.

    The first failing rank's exception is the ``__cause__``.

    Parameters
    ----------
    message : str
        What happened, with the remote traceback of the first failure.
    method : str
        The method that was called.
    failures : mapping of int to Exception
        Rank to its exception, for every rank that had failed when the error was raised.
    hosts : mapping of int to str
        Rank to the address of its host, for the failed ranks.
    running : sequence of int
        Ranks that had not answered yet; they may still be running the call.
    """

    def __init__(
        self,
        message: str,
        method: str = "",
        failures: Mapping[int, BaseException] | None = None,
        hosts: Mapping[int, str] | None = None,
        running: Sequence[int] = (),
    ) -> None:
        super().__init__(message, method, dict(failures or {}), dict(hosts or {}), tuple(running))
        self.failures = dict(failures or {})
        if self.failures:
            # Here rather than with ``raise ... from``: a cause does not survive pickling.
            self.__cause__ = next(iter(self.failures.values()))
        self.hosts = dict(hosts or {})
        self.running = tuple(running)


class RankLostError(RankError):
    """The host of a rank died, was removed, or cannot be reached any more.

    Parameters
    ----------
    message : str
        What happened and what to do.
    method : str
        The method in flight, or ``""``.
    rank : int
        The lost rank.
    host : str
        Address of its host.
    lost : mapping of int to str
        Every rank known to be lost, with the address of its host.
    """

    def __init__(
        self, message: str, method: str = "", rank: int = -1, host: str = "", lost: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message, method, rank, host, dict(lost or {}))
        self.rank = rank
        self.host = host
        self.lost = dict(lost or {}) or ({rank: host} if rank >= 0 else {})


class ChunkLostError(RankError):
    """A piece of data that a call or ``get()`` needs is gone.

    Parameters
    ----------
    message : str
        What happened and what to do.
    method : str
        The method that made the data, or the call that needs it.
    key : str
        The Dask key of the lost data.
    rank : int
        The rank that made it, or -1 where no rank did.
    host : str
        The host that held it, or ``""``.
    """

    def __init__(self, message: str, method: str = "", key: str = "", rank: int = -1, host: str = "") -> None:
        super().__init__(message, method, key, rank, host)
        self.key = key
        self.rank = rank
        self.host = host


class RankTimeoutError(RankError, TimeoutError):
    """Ranks did not answer within the time limit.

    Parameters
    ----------
    message : str
        What happened, and whether the call may still run.
    method : str
        The method that was called.
    timeout_s : float
        The limit, in seconds.
    finished, pending : sequence of int
        Ranks that had answered, and ranks that had not.
    """

    def __init__(
        self,
        message: str,
        method: str = "",
        timeout_s: float = 0.0,
        finished: Sequence[int] = (),
        pending: Sequence[int] = (),
    ) -> None:
        super().__init__(message, method, timeout_s, tuple(finished), tuple(pending))
        self.timeout_s = timeout_s
        self.finished = tuple(finished)
        self.pending = tuple(pending)


class GroupClosedError(ControllerError, RuntimeError):
    """The group was closed; make a new one."""
