"""The hold on a slot, as Dask sees it.

Owns the task that takes ``resources={"GPU": 1}`` on a host for as long as ranks of one pool live there. It secedes
at once, so it costs no thread of the pool, and it ends when the last rank that claimed it is gone, or when its key
is released before any rank claimed it. An actor's own ``resources=`` are held only while it is being made, and
``Worker.set_resources`` does not wake tasks that wait: neither can do this.
"""

from __future__ import annotations

from distributed import get_worker, secede

from dask_controller.runtime.service import Lease, ensure_service

__all__ = ["hold_slot"]

#: How often an unclaimed lease looks whether anybody still wants it, in seconds.
_POLL_S = 0.5


def hold_slot(lease_id: str, pool_id: str, key: str) -> str:
    """Runs as a Dask task on the host: hold the resources of this task until the ranks that use them are gone.

    Parameters
    ----------
    lease_id : str
        Name under which ranks claim the lease.
    pool_id : str
        The pool it is held for.
    key : str
        The key of this very task.
    """
    service = ensure_service(get_worker())
    lease = Lease(lease_id, pool_id, key)
    secede()
    service.add_lease(lease)
    try:
        while not lease.ended.wait(_POLL_S):
            if not lease.ranks and not service.task_is_wanted(key):
                # Under the lock no rank can claim it between this look and the end.
                with service.lock:
                    if not lease.ranks:
                        lease.ended.set()
    finally:
        service.drop_lease(lease)
    return lease_id
