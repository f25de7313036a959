"""Who may import whom, and what ``import dask_controller`` may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import distributed
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dask_controller"
DISTRIBUTED = Path(distributed.__file__).parent

#: A layer, and the layers it may import; each may import itself. A folder or a module of the package is a layer.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "protocol": {"errors", "config"},
    "dispatch": {"errors", "config", "protocol"},
    "runtime": {"errors", "config", "protocol"},
    "pool": {"errors", "config", "protocol", "runtime"},
    "worker": {"errors", "config", "protocol", "dispatch", "runtime"},
    "group": {"errors", "config", "protocol", "dispatch", "runtime", "pool", "worker"},
}
# Whatever is not in the table (integrations, command line, dashboard, dataframes, the package itself) stands on top: it
# may import every layer, and no layer may import it.

#: Modules that may import something beyond their layer, and why.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("protocol.future", "runtime"): "a future of a batch is kept by Dask",
    ("protocol.serialize", "runtime"): "bytes pass through Dask's own serialisation",
    ("runtime", "pool.hosts"): "what a probe reports is in these plain values",
    ("runtime", "pool.devices"): "pure functions over the visible-devices variable",
    ("worker", "pool.devices"): "pure functions over the visible-devices variable",
    ("worker", "pool.hosts"): "a rank's place is in these plain values",
}

#: What may be imported of distributed, and by which parts of the package. Everything else depends on its insides.
DISTRIBUTED_ANYWHERE = {"distributed", "distributed.client", "distributed.diagnostics.plugin", "distributed.protocol"}
DISTRIBUTED_IN = {
    "runtime": {"distributed"},
    "protocol.future": {"distributed"},
    "protocol.serialize": {"distributed"},
}


class Import(NamedTuple):
    """One import statement, or one name of it."""

    importer: str
    line: int
    imported: str

    def __str__(self) -> str:
        return f"dask_controller/{self.importer.replace('.', '/')}:{self.line} imports {self.imported}"


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def find_imports(source: str, importer: str) -> Iterator[Import]:
    """Yield what a module imports, in functions too, but not what only the type checker sees."""

    def walk(node: ast.AST) -> Iterator[Import]:
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.orelse:
                yield from walk(child)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["dask_controller", *importer.split(".")][: -node.level]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(importer, node.lineno, f"{base}.{alias.name}")
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(source))


def modules() -> dict[str, Path]:
    """Return the package's modules by dotted name, without the package's own; ``x.__init__`` keeps its last part."""
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def all_imports() -> list[Import]:
    return [found for name, path in modules().items() for found in find_imports(path.read_text(), name)]


def within(name: str, part: str) -> bool:
    """Say whether a dotted name is a part of the package or lies inside it."""
    return name == part or name.startswith(f"{part}.")


def layering_faults(imports: list[Import]) -> list[str]:
    faults = []
    for found in imports:
        own = found.importer.split(".")[0]
        if own not in LAYERS or not within(found.imported, "dask_controller"):
            continue
        target = found.imported.removeprefix("dask_controller").lstrip(".")
        layer = target.split(".")[0]
        if layer == own or layer in LAYERS[own]:
            continue
        if any(within(found.importer, a) and within(target, b) for a, b in EXCEPTIONS):
            continue
        faults.append(str(found))
    return faults


def private_dask_faults(imports: list[Import]) -> list[str]:
    faults = []
    for found in imports:
        if not within(found.imported, "distributed"):
            continue
        if any(within(found.importer, part) for part in DISTRIBUTED_IN):
            continue
        module = found.imported if found.imported in DISTRIBUTED_ANYWHERE else found.imported.rpartition(".")[0]
        name = found.imported.rpartition(".")[2]
        # `from distributed import comm` names a module, `from distributed import Client` a class.
        is_submodule = module == "distributed" and (
            (DISTRIBUTED / f"{name}.py").exists() or (DISTRIBUTED / name).is_dir()
        )
        if module not in DISTRIBUTED_ANYWHERE or is_submodule or name.startswith("_"):
            faults.append(str(found))
    return faults


def test_lower_layers_do_not_import_higher_ones() -> None:
    assert layering_faults(all_imports()) == []


def test_only_runtime_knows_distributeds_insides() -> None:
    assert private_dask_faults(all_imports()) == []


def test_every_folder_of_the_picture_is_a_layer_or_on_top() -> None:
    known_on_top = {"integrations", "cli", "dashboard", "dataframe", "testing", "__init__", "__main__"}
    assert {name.split(".")[0] for name in modules()} <= LAYERS.keys() | known_on_top


@pytest.mark.parametrize(
    ("importer", "source", "is_fault"),
    [
        ("protocol.batching", "from dask_controller.errors import ChunkError", False),
        ("protocol.batching", "from dask_controller.dispatch import modes", True),
        ("protocol.batching", "from ..dispatch import modes", True),
        ("protocol.batching", "from dask_controller import group", True),
        ("protocol.batching", "import dask_controller.pool.pool", True),
        ("protocol.batching", "from dask_controller import Worker", True),
        ("protocol.batching", "def f():\n    from dask_controller.group import group", True),
        (
            "protocol.batching",
            "import typing as t\nif t.TYPE_CHECKING:\n    import dask_controller.group",
            False,
        ),
        ("protocol.batching", "from dask_controller.runtime import channel", True),
        ("protocol.future", "from dask_controller.runtime.channel import call_host", False),
        ("worker.host", "from dask_controller.pool.pool import ResourcePool", True),
        ("worker.host", "from dask_controller.pool.devices import get_device", False),
        ("group.group", "from dask_controller.worker.base import Worker", False),
        ("group.group", "from dask_controller.cli import main", True),
        ("cli.main", "from dask_controller.group.group import WorkerGroup", False),
    ],
)
def test_the_walk_finds_faults(importer: str, source: str, is_fault: bool) -> None:
    assert bool(layering_faults(list(find_imports(source, importer)))) is is_fault


@pytest.mark.parametrize(
    ("importer", "source", "is_fault"),
    [
        ("group.group", "from distributed import Client, get_worker", False),
        ("group.group", "import distributed", False),
        ("group.group", "from distributed.protocol import dask_serialize", False),
        ("group.group", "from distributed.diagnostics.plugin import WorkerPlugin", False),
        ("group.group", "from distributed.comm import connect", True),
        ("group.group", "from distributed import worker", True),
        ("group.group", "from distributed import comm", True),
        ("group.group", "import distributed.core", True),
        ("group.group", "from distributed.worker import _worker_cvar", True),
        ("group.group", "from distributed.client import _get_global_client", True),
        ("runtime.service", "from distributed.worker import _worker_cvar", False),
    ],
)
def test_the_walk_finds_insides_of_dask(importer: str, source: str, is_fault: bool) -> None:
    assert bool(private_dask_faults(list(find_imports(source, importer)))) is is_fault


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BASELINE = "import torch, tensordict, distributed"

QUIET_IMPORT = f"""
import logging, sys

sockets = []
# An audit hook cannot be removed or bypassed: it sees what C extensions do through Python's socket module too.
sys.addaudithook(lambda event, args: sockets.append(event) if event in WATCHED else None)
WATCHED = {{"socket.bind", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork"}}
{BASELINE}
import threading
modules = set(sys.modules)
handlers = {{name: list(getattr(logger, "handlers", ())) for name, logger in logging.root.manager.loggerDict.items()}}
root = list(logging.root.handlers)
threads = set(threading.enumerate())
sockets.clear()

import dask_controller

assert sockets == [], sockets
assert not torch.cuda.is_initialized()
assert logging.root.handlers == root
for name, logger in logging.root.manager.loggerDict.items():
    assert list(getattr(logger, "handlers", ())) == handlers.get(name, []), name
assert set(threading.enumerate()) == threads
print(*sorted(set(sys.modules) - modules))
"""


def test_import_has_no_effect_and_brings_no_optional_package() -> None:
    new = set(run_python(QUIET_IMPORT).split())
    assert "dask_controller" in new
    optional = {"ray", "verl", "pandas", "matplotlib", "rich", "transformers", "bokeh", "typer", "pytest", "hypothesis"}
    assert {name.split(".")[0] for name in new} & optional == set()
    assert "dask.dataframe" not in new


TIMED_IMPORT = """
import time
start = time.process_time()
import {modules}
print(time.process_time() - start)
"""


@pytest.mark.slow
def test_import_takes_little_more_than_what_it_needs() -> None:
    ours, needed = [], []
    for _ in range(3):
        # Processor time, in turns: neither a busy machine nor a cold disk cache counts against one side.
        needed.append(float(run_python(TIMED_IMPORT.format(modules=BASELINE.removeprefix("import ")))))
        ours.append(float(run_python(TIMED_IMPORT.format(modules="dask_controller"))))
    assert min(ours) < 1.25 * min(needed)
