"""Single-controller reinforcement-learning post-training on Dask distributed.

One program owns groups of ranks on the hosts of a Dask cluster and calls their methods; a decorator on each method
says how a batch is split over the ranks and how the results are joined.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dask_controller import config, errors
from dask_controller.dispatch.functions import (
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_rank_zero,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    dispatch_rank_zero,
)
from dask_controller.dispatch.mesh import (
    collect_lazy_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    make_nd_compute_dataproto_dispatch_fn,
)
from dask_controller.dispatch.modes import Dispatch, Execute
from dask_controller.dispatch.register import MAGIC_ATTR, register
from dask_controller.dispatch.registry import (
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from dask_controller.group.class_args import ClassWithInitArgs, DaskClassWithInitArgs
from dask_controller.group.colocate import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from dask_controller.group.detached import destroy_detached, list_detached
from dask_controller.group.group import DaskWorkerGroup, WorkerGroup
from dask_controller.group.rank_handle import RankHandle
from dask_controller.pool.manager import ResourcePoolManager
from dask_controller.pool.pool import DaskResourcePool, ResourcePool, SubDaskResourcePool
from dask_controller.pool.split import extract_from_existing, merge_resource_pool, split_resource_pool
from dask_controller.protocol.batch_data import BatchData
from dask_controller.protocol.collate import collate_fn
from dask_controller.protocol.config import DataProtoConfig
from dask_controller.protocol.data_proto import DataProto, DataProtoItem
from dask_controller.protocol.folding import fold_batch_dim, unfold_batch_dim
from dask_controller.protocol.future import DataProtoFuture
from dask_controller.protocol.gather import all_gather_data_proto
from dask_controller.protocol.meta import list_of_dict_to_dict_of_list
from dask_controller.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from dask_controller.protocol.union import union_numpy_dict, union_tensor_dict
from dask_controller.worker.base import Worker

try:
    __version__ = version("dask-controller")
except PackageNotFoundError:  # a source tree on the path, never installed
    __version__ = "0+unknown"

__all__ = [
    "MAGIC_ATTR",
    "BatchData",
    "ClassWithInitArgs",
    "DaskClassWithInitArgs",
    "DaskResourcePool",
    "DaskWorkerGroup",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "RankHandle",
    "ResourcePool",
    "ResourcePoolManager",
    "SubDaskResourcePool",
    "Worker",
    "WorkerGroup",
    "__version__",
    "all_gather_data_proto",
    "collate_fn",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "collect_rank_zero",
    "config",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "destroy_detached",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "dispatch_rank_zero",
    "errors",
    "extract_from_existing",
    "fold_batch_dim",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "list_detached",
    "list_of_dict_to_dict_of_list",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "update_dispatch_mode",
]
