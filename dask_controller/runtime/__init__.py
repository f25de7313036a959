"""Everything that depends on how ``distributed`` works inside.

Owns the assumptions: message channels over Dask's own connections, keys that are announced to the scheduler
before they exist, facts read off a host's state machine. Each has a test under ``tests/runtime/``, so that a new
release of distributed breaks one place and says where. Does not own what the messages mean: that is ``worker/``
on the host and ``group/`` on the controller.
"""
