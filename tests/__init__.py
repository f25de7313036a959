"""The test suite; it mirrors the package.

A package, so that no ``tests`` package of some other distribution can stand in its place on a host's import path.
"""
