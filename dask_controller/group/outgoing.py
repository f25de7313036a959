"""The arguments of one call on their way out.

Owns packing each distinct object once, the form in which it travels to each host that needs it, and whose memory its
bytes lie in meanwhile. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Future

from dask_controller.protocol.future import DataProtoFuture
from dask_controller.protocol.serialize import Packed, pack
from dask_controller.runtime import shm
from dask_controller.runtime.channel import Channel

__all__ = ["Outgoing"]


def _is_reference(value: object) -> bool:
    return isinstance(value, (Future, DataProtoFuture))


class Outgoing:
    """The packed arguments of one call: each distinct object once."""

    def __init__(self, materialize: bool) -> None:
        self._is_ref = _is_reference if materialize else None
        self._index: dict[int, int] = {}
        self._alive: list[Any] = []
        self.values: list[Packed] = []
        #: For each value, where its references lie; filled in before sending.
        self.plans: list[list[Any]] = []
        #: Address and position to what is written to the connection.
        self.encoded: dict[tuple[str, int], Any] = {}
        self._needed: Mapping[str, Sequence[int]] = {}

    def add(self, value: Any) -> int:
        """Pack ``value`` unless this very object is packed already; returns its position."""
        position = self._index.get(id(value))
        if position is None:
            position = self._index[id(value)] = len(self.values)
            # ids are unique only among living objects.
            self._alive.append(value)
            self.values.append(pack(value, is_ref=self._is_ref))
            self.plans.append([])
        return position

    @property
    def has_references(self) -> bool:
        return any(packed.refs for packed in self.values)

    def encode(self, needed: Mapping[str, Sequence[int]], channels: Mapping[str, Channel]) -> None:
        """Put every value into the form in which it travels to each host that needs it.

        Values that go by memory of the machine are copied here, once per host; of the others nothing is copied.
        """
        self._needed = needed
        for address, positions in needed.items():
            for position in positions:
                self.encoded[address, position] = channels[address].encode(self.values[position])

    @property
    def nbytes_borrowed(self) -> int:
        """Bytes that will still be read from the caller's own memory."""
        borrowed = {i for (_, i), value in self.encoded.items() if not isinstance(value, (bytes, dict))}
        return sum(self.values[i].nbytes for i in borrowed)

    def own(self, channels: Mapping[str, Channel]) -> None:
        """Copy what is still in the caller's memory."""
        owned: dict[int, Packed] = {}
        for (address, position), value in list(self.encoded.items()):
            if not isinstance(value, (bytes, dict)):
                if position not in owned:
                    owned[position] = self.values[position].copied()
                self.encoded[address, position] = channels[address].encode(owned[position])

    def nbytes_of(self, positions: Sequence[int]) -> int:
        """Bytes of some of the values."""
        return sum(self.values[i].nbytes for i in positions)

    def message_values(self, address: str) -> list[dict[str, Any]]:
        out = []
        for position in self._needed[address]:
            value = {"value": self.encoded[address, position]}
            if self.values[position].refs:
                value["refs"] = self.plans[position]
            out.append(value)
        return out

    def discard(self) -> None:
        """The call will not be sent: give its memory back."""
        for value in self.encoded.values():
            if isinstance(value, dict):
                shm.own_pool_release(value)
        self.encoded.clear()
