"""What is public: the names, their docstrings, and how they show themselves."""

from __future__ import annotations

import enum
import importlib
import inspect
import types
from collections.abc import Iterator

import pytest

import dask_controller
from dask_controller import errors

#: Names that the contract fixes.
CONTRACT = {
    # dispatch and execution modes
    *("Dispatch", "Execute", "register", "MAGIC_ATTR"),
    *("register_dispatch_mode", "update_dispatch_mode", "get_predefined_dispatch_fn", "get_predefined_execute_fn"),
    *("dispatch_one_to_all", "dispatch_all_to_all", "dispatch_dp_compute", "dispatch_dp_compute_data_proto"),
    *("dispatch_dp_compute_data_proto_with_func", "dispatch_nd_compute", "dispatch_nd_compute_dataproto"),
    "dispatch_lazy_compute_data_proto",
    *("collect_all_to_all", "collect_dp_compute", "collect_dp_compute_data_proto", "collect_nd_compute"),
    *("collect_nd_compute_dataproto", "collect_lazy_compute_data_proto", "make_nd_compute_dataproto_dispatch_fn"),
    # data
    *("BatchData", "DataProto", "DataProtoItem", "DataProtoConfig", "DataProtoFuture"),
    *("pad_dataproto_to_divisor", "unpad_dataproto", "collate_fn", "all_gather_data_proto"),
    *("union_tensor_dict", "union_numpy_dict", "list_of_dict_to_dict_of_list", "fold_batch_dim", "unfold_batch_dim"),
    # ranks, placement, groups
    "Worker",
    *("ResourcePool", "DaskResourcePool", "SubDaskResourcePool", "ResourcePoolManager"),
    *("split_resource_pool", "merge_resource_pool", "extract_from_existing"),
    *("ClassWithInitArgs", "DaskClassWithInitArgs", "WorkerGroup", "DaskWorkerGroup"),
    *("create_colocated_worker_cls", "create_colocated_worker_cls_fused"),
}

#: Members that the contract fixes.
MEMBERS = {
    "Dispatch": "register remove from_name names values",
    "BatchData": "is_chunkable is_concatable chunk concat",
    "DataProto": """from_single_dict from_dict from_tensordict to_tensordict check_consistency select select_idxs slice
        pop rename union reorder repeat sample_level_repeat unfold_column_chunks to
        chunk split concat padding is_padding_enabled make_iterator save_to_disk load_from_disk print_size
        get_data_info""",
    "DataProtoConfig": "auto_padding",
    "DataProtoFuture": "futures get result done chunk concat __await__",
    "Worker": """rank world_size get_master_addr_port get_available_master_addr_port get_cuda_visible_devices env_keys
        _register_dispatch_collect_info _query_dispatch_info _query_collect_info query_collect_info get_dispatch_collect
        set_dispatch_collect execute_with_func_generator execute_func_rank_zero fused_worker_dict
        get_fused_worker_by_name""",
    "ResourcePool": "add_node world_size store __call__ local_world_size_list local_rank_list",
    "ResourcePoolManager": "create_resource_pool get_resource_pool get_n_gpus",
    "DaskClassWithInitArgs": "update_options set_additional_resource",
    "DaskWorkerGroup": """execute_rank_zero execute_rank_zero_sync execute_rank_zero_async execute_all execute_all_sync
        execute_all_async world_size workers worker_names master_address master_port start_worker_aliveness_check
        from_detached spawn fuse close __enter__ __exit__""",
}

#: Set in ``__init__``: the class does not have them.
INSTANCE_ATTRIBUTES = {"DataProtoFuture": {"futures"}, "Worker": {"fused_worker_dict"}}


def public(name: str) -> object:
    return getattr(dask_controller, name)


def test_names_of_the_contract_are_public() -> None:
    assert CONTRACT - set(dask_controller.__all__) == set()


def test_all_is_what_imports() -> None:
    assert len(set(dask_controller.__all__)) == len(dask_controller.__all__)
    namespace: dict[str, object] = {}
    exec("from dask_controller import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(dask_controller.__all__)
    unlisted = {
        name
        for name, value in vars(dask_controller).items()
        # Modules of the package become its attributes as they are imported; those meant for use are in __all__.
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in dask_controller.__all__
    }
    # `from __future__ import annotations` leaves its name behind; the version look-up its two.
    assert unlisted - {"annotations", "PackageNotFoundError", "version"} == set()


def test_errors_are_public_and_all_of_them() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.ControllerError) for name in defined)


def public_objects() -> Iterator[tuple[str, object]]:
    for name in dask_controller.__all__:
        yield name, public(name)
    for name in errors.__all__:
        yield f"errors.{name}", getattr(errors, name)


def members(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the public methods and properties that a class of this package defines."""
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, property) or inspect.isfunction(function):
            yield name, function


def test_every_public_name_has_a_docstring() -> None:
    bare = []
    for name, value in public_objects():
        if isinstance(value, (str, int)):
            continue
        # Not inspect.getdoc: a docstring inherited from a base class says nothing about this one.
        if not (getattr(value, "__doc__", None) or "").strip():
            bare.append(name)
        if isinstance(value, type) and not issubclass(value, enum.Enum):
            bare += [f"{name}.{member}" for member, function in members(value) if not inspect.getdoc(function)]
    assert bare == []


def test_public_classes_and_functions_show_as_the_packages() -> None:
    for name, value in public_objects():
        if isinstance(value, type) or inspect.isfunction(value):
            assert value.__module__.split(".")[0] == "dask_controller", name
            assert value.__qualname__ == name.removeprefix("errors."), name
            # By this name it is pickled: it must lead back to the same object.
            assert getattr(importlib.import_module(value.__module__), value.__qualname__) is value, name
        # Enumerations show their members instead.
        if type(value).__repr__ is type.__repr__:
            assert repr(value) == f"<class '{value.__module__}.{value.__qualname__}'>", name


@pytest.mark.parametrize("cls", MEMBERS)
def test_members_of_the_contract(cls: str) -> None:
    owner = public(cls)
    known = INSTANCE_ATTRIBUTES.get(cls, set())
    # getattr and not dir: a property of the metaclass is a member too.
    assert [name for name in MEMBERS[cls].split() if name not in known and not hasattr(owner, name)] == []


def test_modes_of_the_contract() -> None:
    assert {
        *("RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC"),
        *("DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD"),
    } <= set(dask_controller.Dispatch.names())
    assert {"ALL", "RANK_ZERO"} <= set(dask_controller.Execute.names())
    assert dask_controller.MAGIC_ATTR == "attrs_3141562937"


def test_unknown_names_are_an_error() -> None:
    with pytest.raises(AttributeError):
        public("NoSuchName")


def test_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert dask_controller.__version__ == version("dask-controller")
