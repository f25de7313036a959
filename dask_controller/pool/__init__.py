"""Where ranks live: pools of slots on the hosts of a Dask cluster.

Owns which slots a pool gets and which device belongs to each (pure functions over plain facts about hosts), the pools
that users make, cut and join, and the lease that holds a slot. Does not own how the facts are gathered (``runtime/``)
or what lives on a slot (``worker/``, ``group/``).
"""
