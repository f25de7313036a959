"""Keys that exist before their data: the futures of non-blocking calls.

A non-blocking call hands out real ``distributed.Future`` objects at once, while the value is still being made on
the rank's host. Dask has no public way to say "this key will come from outside the graph": a future made by hand
resolves once ``update_data`` announces its key, but ``client.submit(f, future)`` before that is cancelled with
"lost dependencies". So a small scheduler plugin makes the key known to the scheduler in state ``waiting``, through
the client's own ordered message stream (the announcement therefore precedes any graph that uses the key), and
later moves it to ``memory`` or ``erred``. No task runs for it: no thread or slot of a host is taken, and a busy
dataframe does not delay a finished result.

Where the scheduler cannot import this package the plugin is not there; then keys are announced with
``update_data`` when they are ready, and only ``submit`` on a still pending future is refused.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Sequence
from time import time
from typing import TYPE_CHECKING, Any

from distributed import Client, Future
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import to_serialize

from dask_controller.errors import RemoteError
from dask_controller.runtime.clients import client_loop, scheduler_of

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

__all__ = ["PendingKeys", "announce", "has_plugin", "install_plugin", "new_future", "resolve", "resolve_error"]

logger = logging.getLogger(__name__)

_PLUGIN_NAME = "dask-controller-pending-keys"
#: Whether the scheduler of a client has the plugin, for the clients that have asked.
_installed: weakref.WeakKeyDictionary[Client, bool] = weakref.WeakKeyDictionary()

_OP_ANNOUNCE = "dask-controller-announce"
_OP_READY = "dask-controller-ready"
_OP_FAILED = "dask-controller-failed"


class PendingKeys(SchedulerPlugin):
    """Scheduler side: keys whose data a host will report through the controller."""

    name = _PLUGIN_NAME
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        scheduler.stream_handlers.update({_OP_ANNOUNCE: self.announce, _OP_READY: self.ready, _OP_FAILED: self.failed})

    def announce(self, client: str, keys: Sequence[str]) -> None:
        scheduler = self.scheduler
        for key in keys:
            if key not in scheduler.tasks:
                ts = scheduler.new_task(key, None, "waiting")
                # Dependents sort their inputs by priority; a task that never came through a graph has none.
                ts.priority = (0, scheduler.generation, 0)
        scheduler.client_desires_keys(keys=keys, client=client)

    def ready(self, client: str, key: str, worker: str, nbytes: int, type: bytes, typename: str) -> None:
        scheduler = self.scheduler
        stimulus_id = f"dask-controller-ready-{time()}"
        ts = scheduler.tasks.get(key)
        ws = scheduler.workers.get(worker)
        if ws is None:
            # The host went between its answer and this message; the channel reports the loss by itself.
            if ts is not None and ts.state == "waiting":
                scheduler.transitions({key: "forgotten"}, stimulus_id)
            return
        if ts is None or ts.state != "waiting":
            if ts is None:
                # Dropped while it was being made: nobody wants it, so the host must let go of the value.
                scheduler.worker_send(worker, {"op": "free-keys", "keys": [key], "stimulus_id": stimulus_id})
            return
        recommendations: dict[Any, Any] = {}
        client_msgs: dict[str, list[dict[str, Any]]] = {}
        worker_msgs: dict[str, list[dict[str, Any]]] = {}
        ts.set_nbytes(nbytes)
        scheduler._add_to_memory(ts, ws, recommendations, client_msgs, type=type, typename=typename)
        scheduler._transitions(recommendations, client_msgs, worker_msgs, stimulus_id)
        scheduler.send_all(client_msgs, worker_msgs)

    def failed(self, client: str, key: str, exception: Any, text: str) -> None:
        scheduler = self.scheduler
        ts = scheduler.tasks.get(key)
        if ts is None or ts.state != "waiting":
            return
        ts.exception = exception
        ts.exception_text = text
        ts.traceback = None
        ts.traceback_text = ""
        ts.exception_blame = ts
        recommendations: dict[Any, Any] = {}
        for dependent in list(ts.dependents):
            dependent.exception_blame = ts
            recommendations[dependent.key] = "erred"
        if ts.waiters:
            ts.waiters.clear()
        ts.state = "erred"
        report = {"op": "task-erred", "key": key, "exception": exception, "traceback": None}
        client_msgs: dict[str, list[dict[str, Any]]] = {cs.client_key: [report] for cs in ts.who_wants or ()}
        worker_msgs: dict[str, list[dict[str, Any]]] = {}
        scheduler._transitions(recommendations, client_msgs, worker_msgs, f"dask-controller-failed-{time()}")
        scheduler.send_all(client_msgs, worker_msgs)


def install_plugin(client: Client) -> bool:
    """Register :class:`PendingKeys` with the scheduler of ``client``; say whether it is there.

    Returns
    -------
    bool
        False where the scheduler cannot import this package. Everything then works but ``client.submit`` on a
        future that is still pending.
    """
    known = _installed.get(client)
    if known is not None:
        return known
    try:
        client.register_plugin(PendingKeys())
    except Exception as error:
        logger.warning(
            "The scheduler cannot load dask_controller (%s: %s). Calls work; only client.submit() on the result of "
            "a non-blocking call that is still running will be cancelled. Install dask-controller in the "
            "scheduler's environment.",
            type(error).__name__,
            error,
        )
        _installed[client] = False
        return False
    _installed[client] = True
    return True


def has_plugin(client: Client) -> bool:
    """Whether :func:`install_plugin` succeeded for ``client``."""
    return _installed.get(client, False)


def new_future(client: Client, key: str) -> Future[Any]:
    """A pending future for a key that nothing has announced yet."""
    return Future(key, client)


def announce(client: Client, keys: Sequence[str]) -> None:
    """Tell the scheduler that data for ``keys`` will come. One small message, sent in order with graphs."""
    if has_plugin(client):
        client._send_to_scheduler({"op": _OP_ANNOUNCE, "keys": list(keys)})


async def resolve(client: Client, key: str, address: str, nbytes: int, typename: str) -> None:
    """Report that ``key`` now lies on the host at ``address``; its future becomes finished.

    Runs on the client's event loop. Sends one message; where the plugin is missing, one round trip.
    """
    if has_plugin(client):
        client._send_to_scheduler(
            {
                "op": _OP_READY,
                "key": key,
                "worker": address,
                "nbytes": nbytes,
                "type": pickle.dumps(typename),
                "typename": typename.rpartition(".")[2] or "object",
            }
        )
        return
    await scheduler_of(client).update_data(who_has={key: [address]}, nbytes={key: nbytes}, client=client.id)
    if key not in client.futures:
        # Dropped before, or meanwhile: the release may have overtaken the request, which has a connection of its own.
        client._send_to_scheduler({"op": "client-releases-keys", "keys": [key]})


def resolve_error(client: Client, key: str, error: BaseException) -> None:
    """Make the future of ``key`` fail with ``error``, and with it every task that depends on it.

    Runs on the client's event loop.
    """
    try:
        raw = pickle.dumps(error)
        pickle.loads(raw)
    except Exception:
        raw = pickle.dumps(RemoteError(f"{type(error).__module__}.{type(error).__qualname__}", str(error)))
    if has_plugin(client):
        client._send_to_scheduler({"op": _OP_FAILED, "key": key, "exception": to_serialize(raw), "text": repr(error)})
    else:
        client_loop(client).call_soon(_set_error, client, key, raw)


def _set_error(client: Client, key: str, raw: bytes) -> None:
    # The client keeps what it is given here. A copy, because the original is raised to the user and its traceback
    # would keep the user's futures alive; on a stack of its own and without tracebacks, because tblib builds them of
    # frames that refer to whoever unpickles them.
    state = client.futures.get(key)
    if state is None:
        return
    copy = pickle.loads(raw)
    for error in (copy, *getattr(copy, "failures", {}).values()):
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__
    state.set_error(copy, None)
