"""Watching hosts that may be stopped without being gone."""

from __future__ import annotations

import asyncio
import logging

from dask_controller.group.engine import Engine
from dask_controller.runtime.channel import call_host

__all__ = ["AlivenessCheck"]

logger = logging.getLogger(__name__)


class AlivenessCheck:
    """Asks the hosts of a group for a sign of life, again and again, and logs when one gives none.

    Parameters
    ----------
    engine : Engine
        The group's calls.
    every_s : float
        Seconds between two rounds, and how long a host may take to answer.
    """

    def __init__(self, engine: Engine, every_s: float) -> None:
        self.silent: set[str] = set()
        self._engine = engine
        self._every_s = every_s
        engine.on_lost.append(self._lost)
        engine.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._run()))

    def _lost(self, lost: dict[int, str], reason: str) -> None:
        logger.error(
            "group %r lost rank(s) %s: %s. Its next call raises RankLostError",
            self._engine.name,
            ", ".join(f"{rank} ({host})" for rank, host in lost.items()),
            reason,
        )

    async def _run(self) -> None:
        engine = self._engine
        while not engine.closed and not engine.lost:
            await asyncio.gather(*(self._ask(address) for address in dict.fromkeys(engine.hosts)))
            await asyncio.sleep(self._every_s)

    async def _ask(self, address: str) -> None:
        engine = self._engine
        try:
            await asyncio.wait_for(
                call_host(engine.client, address, "status", route=engine.route, group_id=engine.group_id),
                max(self._every_s, 1.0),
            )
        except Exception as error:
            if address not in self.silent and not engine.closed:
                self.silent.add(address)
                logger.error(
                    "host %s of group %r gives no sign of life (%s): it is stopped, cut off, or its event loop is "
                    "blocked",
                    address,
                    engine.name,
                    type(error).__name__,
                )
        else:
            self.silent.discard(address)
