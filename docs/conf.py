"""Sphinx: ``pip install -e '.[docs]'`` and ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

from importlib.metadata import version as _version

project = "dask-controller"
author = "The dask-controller developers"
release = version = _version("dask-controller")

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
# The same anchors that GitHub makes, so that one link works in both places.
myst_heading_anchors = 3

# numpydoc brings autosummary, whose stubs would be .rst files.
autosummary_generate = False

autodoc_typehints = "none"
numpydoc_show_class_members = False

html_theme = "alabaster"
