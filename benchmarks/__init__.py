"""Measurements beside a peer in the same run: ``python -m benchmarks.run``, or ``make bench``."""
