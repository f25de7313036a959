"""What a rank knows of itself, and the environment variables that say the same to torch.

Owns rank, sizes, rendezvous address and device of a rank as plain values. The context reaches user code through a
context variable, because hosts can share one process and then cannot each have an environment; ``os.environ`` is
set as well wherever a process carries one rank only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from dask_controller.pool.devices import visible_devices_variable

__all__ = ["EnvironmentPatch", "RankContext", "current_context", "enter_context", "protected_variables"]

_current: ContextVar[RankContext | None] = ContextVar("dask_controller_rank", default=None)


@dataclass(frozen=True)
class RankContext:
    """Identity of one rank."""

    #: Rank in ``[0, world_size)``.
    rank: int
    #: Number of ranks of the group.
    world_size: int
    #: Rank among the ranks of the same pool entry (node).
    local_rank: int = 0
    #: Ranks of the same pool entry (node).
    local_world_size: int = 1
    #: Index of the pool entry (node).
    node_rank: int = 0
    #: Address of rank 0 for ``torch.distributed``.
    master_addr: str = "127.0.0.1"
    #: Port of rank 0, held free for this group until it closes.
    master_port: int = 0
    #: Name of the group.
    group: str = ""
    #: Address of the Dask worker this rank lives on.
    host: str = ""
    #: Ordinal of the rank's device inside the host's own mask; None without accelerator.
    device: int | None = None
    #: Further variables asked for with ``worker_env=``.
    worker_env: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The variables that ``torch.distributed`` and kin read, as strings."""
        return {
            **self.worker_env,
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @classmethod
    def from_environment(cls) -> RankContext:
        """The context that ``torchrun``-like variables describe.

        Raises
        ------
        RuntimeError
            Names the variables that are missing.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if missing:
            raise RuntimeError(
                f"A Worker needs to know its rank: {' and '.join(missing)} not set. Make it through a DaskWorkerGroup, "
                "or set RANK and WORLD_SIZE (and MASTER_ADDR, MASTER_PORT for torch.distributed) in the environment."
            )
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(os.environ.get("MASTER_PORT", "0") or 0),
        )


def protected_variables() -> list[str]:
    """Variables that belong to the group and that ``worker_env`` may not override."""
    return [
        "WORLD_SIZE",
        "RANK",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        visible_devices_variable(),
    ]


def current_context() -> RankContext | None:
    """The context of the rank whose code is running here, or None outside of ranks."""
    return _current.get()


def enter_context(context: RankContext | None) -> Token[RankContext | None]:
    """Make ``context`` the current one for this thread or coroutine."""
    return _current.set(context)


class EnvironmentPatch:
    """Variables set for the life of a rank, put back when it ends.

    Parameters
    ----------
    variables : mapping of str to str
        What to set.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._before: dict[str, str | None] | None = None

    def apply(self) -> None:
        """Set the variables, remembering what was there."""
        if self._before is None:
            self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def restore(self) -> None:
        """Put back what :meth:`apply` found. Does nothing the second time."""
        before, self._before = self._before, None
        for name, value in (before or {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
