"""How much a host is given before it has worked off what it has.

Owns the count of argument bytes in flight per host and the list of hosts that Dask has paused; a call with large
arguments waits here, in the user's thread, before it is packed for the wire. No I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

__all__ = ["Flow"]

#: A waiting call looks this often whether the group can still be used, in seconds.
_CHECK_S = 1.0


class Flow:
    """Bytes in flight to the hosts of a group.

    Parameters
    ----------
    limit_nbytes : int
        Bytes that one host may hold for calls that are queued or running there.
    small_nbytes : int
        Arguments of at most this size are not counted and never wait.
    patience_s : float
        How long a call waits for a paused host.
    """

    def __init__(self, limit_nbytes: int, small_nbytes: int, patience_s: float) -> None:
        self._limit_nbytes = limit_nbytes
        self._small_nbytes = small_nbytes
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._in_flight: dict[str, int] = {}
        self._paused: set[str] = set()

    def admit(
        self, nbytes: Mapping[str, int], check: Callable[[], None], refuse: Callable[[str, float], Exception]
    ) -> dict[str, int]:
        """Wait until the hosts can take so many more bytes. A call that finds nothing in flight is let through.

        Parameters
        ----------
        nbytes : mapping of str to int
            Address to bytes of arguments.
        check : callable
            Raises when waiting has become pointless.
        refuse : callable
            Makes the error for a host that stays paused too long, from its address and the seconds waited.

        Returns
        -------
        dict
            What was counted, for :meth:`dismiss`.
        """
        large = {address: n for address, n in nbytes.items() if n > self._small_nbytes}
        if not large:
            return {}
        waited_s = 0.0
        with self._changed:
            while (blocked := self._blocked(large)) is not None:
                if not self._changed.wait(_CHECK_S):
                    waited_s += _CHECK_S
                check()
                if blocked in self._paused and waited_s >= self._patience_s:
                    raise refuse(blocked, waited_s)
            for address, n in large.items():
                self._in_flight[address] = self._in_flight.get(address, 0) + n
        return large

    def _blocked(self, nbytes: Mapping[str, int]) -> str | None:
        for address, n in nbytes.items():
            busy = self._in_flight.get(address, 0)
            if address in self._paused or (busy and busy + n > self._limit_nbytes):
                return address
        return None

    def dismiss(self, counted: dict[str, int]) -> None:
        """The hosts are done with what :meth:`admit` counted. Empties it, so that a second time does nothing."""
        if not counted:
            return
        with self._changed:
            for address, n in counted.items():
                self._in_flight[address] -= n
            counted.clear()
            self._changed.notify_all()

    def in_flight(self, address: str) -> int:
        """Bytes in flight to a host."""
        return self._in_flight.get(address, 0)

    def pause(self, address: str) -> None:
        """The host takes no more data for now."""
        with self._changed:
            self._paused.add(address)

    def resume(self, address: str) -> None:
        """The host takes data again."""
        with self._changed:
            self._paused.discard(address)
            self._changed.notify_all()

    def paused(self) -> list[str]:
        """Hosts that take no more data."""
        return list(self._paused)
