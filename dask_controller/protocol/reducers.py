"""How torch tensors, TensorDicts and numpy arrays turn into a small description plus raw buffers, and back.

Owns the byte layout of single values. It does not know streams, versions or Dask: that is
:mod:`~dask_controller.protocol.serialize`, whose pickler asks :func:`reduce_value` about every object that is not a
plain builtin.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict

from dask_controller.errors import UnsupportedTypeError, WireFormatError

__all__ = ["INBAND_NBYTES", "PLAIN_MAKERS", "raw_bytes", "reduce_value", "to_host", "writable"]

#: Values up to this size travel inside the stream: a frame of its own costs more than the copy.
INBAND_NBYTES = 1024

Reduced = tuple[Any, ...]
_Buffer = Any  # bytes, bytearray, memoryview, numpy array: whatever pickle hands back


# --- buffers -----------------------------------------------------------------------------------------------------


def writable(buffer: _Buffer) -> _Buffer:
    """Return ``buffer`` itself, or a private copy where it is read-only (users write into what they receive)."""
    view = memoryview(buffer)
    return bytearray(view) if view.readonly else buffer


def _bytes_over(buffer: _Buffer, alignment: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """View ``buffer`` as bytes that can be written and that are aligned; copies only where they are not."""
    array = np.frombuffer(writable(buffer), dtype=np.uint8)
    # A frame cut out of a larger message may start anywhere. Vectorised kernels may fault on such addresses.
    return array.copy() if array.ctypes.data % alignment else array


def _frame(array: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    view = memoryview(cast("Any", array))
    return bytearray(view) if view.nbytes <= INBAND_NBYTES else pickle.PickleBuffer(view)


# --- tensors -----------------------------------------------------------------------------------------------------


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values on the CPU, without its autograd history. No copy where it is there already."""
    tensor = tensor.detach()
    return tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu()


class _Memory:
    """Shows the memory of a contiguous CPU tensor to numpy and keeps the tensor alive.

    ``Tensor.numpy()`` would mark the caller's storage as not resizable for ever, knows no bf16 or fp8, and DLPack
    gives read-only arrays with older numpy and torch.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        nbytes = tensor.numel() * tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (tensor.data_ptr(), False),
        }


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of exactly what a strided tensor shows, in C order; a view where the tensor is contiguous on the CPU."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(_Memory(to_host(tensor).resolve_conj().resolve_neg().contiguous()))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make_tensor(buffer: _Buffer, dtype_name: str, shape: tuple[int, ...], requires_grad: bool = False) -> torch.Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise WireFormatError(
            f"The bytes hold a tensor of dtype {dtype_name!r}, which torch {torch.__version__} does not know. "
            "Run the same torch version on both sides."
        )
    if buffer is None:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        flat = torch.from_numpy(_bytes_over(buffer, min(dtype.itemsize, 8)))
        tensor = flat.view(dtype).view(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _make_parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=requires_grad)


def _make_subclass(data: torch.Tensor, cls: type[torch.Tensor], requires_grad: bool, state: Any) -> torch.Tensor:
    tensor = data.as_subclass(cls)
    if state:
        tensor.__dict__.update(state)
    return tensor.requires_grad_() if requires_grad else tensor


def _make_meta(dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return torch.empty_strided(
        shape, stride, dtype=getattr(torch, dtype_name), device="meta", requires_grad=requires_grad
    )


def _make_jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, ragged_dim: int, requires_grad: bool
) -> torch.Tensor:
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)
    return nested.detach().requires_grad_() if requires_grad else nested


def _make_nested(parts: list[torch.Tensor], dtype_name: str, requires_grad: bool) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, dtype=getattr(torch, dtype_name), requires_grad=requires_grad)


def _make_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, requires_grad=requires_grad, check_invariants=False
    )


def _make_compressed(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: str,
    requires_grad: bool,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        outer,
        inner,
        values,
        shape,
        layout=getattr(torch, layout),
        requires_grad=requires_grad,
        check_invariants=False,
    )


def _reduce_jagged(tensor: torch.Tensor) -> Reduced:
    ragged_dim = int(tensor._ragged_idx)  # type: ignore[attr-defined]
    host = to_host(tensor)
    lengths = host.lengths()  # type: ignore[attr-defined]
    if lengths is not None:
        try:
            # A narrowed nested tensor shows parts of a larger buffer; only the shown parts should travel.
            host, lengths = host.contiguous(), None
        except (RuntimeError, NotImplementedError):
            pass
    values, offsets = host.values(), host.offsets()  # type: ignore[attr-defined]
    return _make_jagged, (values.detach(), offsets, lengths, ragged_dim, tensor.requires_grad)


def _reduce_sparse(tensor: torch.Tensor) -> Reduced:
    host, shape, grad = to_host(tensor), tuple(tensor.shape), tensor.requires_grad
    if host.layout is torch.sparse_coo:
        return _make_coo, (host._indices(), host._values(), shape, host.is_coalesced(), grad)
    by_row = host.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer = host.crow_indices() if by_row else host.ccol_indices()
    inner = host.col_indices() if by_row else host.row_indices()
    return _make_compressed, (outer, inner, host.values(), shape, _dtype_name_of_layout(host.layout), grad)


def _dtype_name_of_layout(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.")


def reduce_tensor(tensor: torch.Tensor) -> Reduced | None:
    """Describe any tensor; None leaves an unknown subclass to its own pickling."""
    cls = type(tensor)
    if cls is torch.Tensor:
        return _reduce_plain(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        if cls is torch.nn.Parameter:
            return _make_parameter, (tensor.detach(), tensor.requires_grad)
        return None
    if tensor.is_nested and tensor.layout is torch.jagged:
        return _reduce_jagged(tensor)
    if isinstance(tensor, MemoryMappedTensor):
        # The file is on this machine; what travels is the data.
        return _reduce_plain(tensor)
    if cls.__name__ == "DTensor":
        raise UnsupportedTypeError(
            "a DTensor belongs to the process group of its ranks and cannot be sent; "
            "send `tensor.full_tensor()` or `tensor.to_local()`"
        )
    plain_class = (
        cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and cls.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and tensor.layout is torch.strided
    )
    if plain_class:
        data = tensor.detach().as_subclass(torch.Tensor)
        return _make_subclass, (data, cls, tensor.requires_grad, dict(tensor.__dict__))
    return None


def _reduce_plain(tensor: torch.Tensor) -> Reduced:
    if tensor.is_nested:
        if tensor.layout is torch.jagged:
            return _reduce_jagged(tensor)
        parts = [part.detach() for part in tensor.unbind()]
        return _make_nested, (parts, _dtype_name(tensor.dtype), tensor.requires_grad)
    if tensor.layout is not torch.strided:
        if tensor.layout in _SPARSE_LAYOUTS:
            return _reduce_sparse(tensor)
        raise UnsupportedTypeError(
            f"a tensor of layout {tensor.layout} has no portable bytes; send `tensor.to_dense()`"
        )
    if tensor.is_quantized:
        raise UnsupportedTypeError(
            f"a quantized tensor ({tensor.dtype}) has no portable bytes; send `tensor.dequantize()`, or "
            "`tensor.int_repr()` with its scale and zero point"
        )
    shape = tuple(tensor.shape)
    if tensor.device.type == "meta":
        return _make_meta, (_dtype_name(tensor.dtype), shape, tensor.stride(), tensor.requires_grad)
    # numel == 0 has no bytes, and an empty frame would only cost.
    buffer = None if tensor.numel() == 0 else _frame(raw_bytes(tensor))
    if tensor.requires_grad:
        return _make_tensor, (buffer, _dtype_name(tensor.dtype), shape, True)
    return _make_tensor, (buffer, _dtype_name(tensor.dtype), shape)


_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


# --- tensordicts -------------------------------------------------------------------------------------------------


def _make_tensordict(
    items: dict[Any, Any], batch_size: tuple[int, ...], device: str | None, names: Any, locked: bool
) -> TensorDict:
    td = TensorDict._new_unsafe(
        items, batch_size=torch.Size(batch_size), device=None if device is None else torch.device(device), names=names
    )
    return td.lock_() if locked else td


def reduce_tensordict(td: TensorDict) -> Reduced:
    """Describe a TensorDict; its columns follow as values of their own."""
    device = None
    if td.device is not None:
        device = "meta" if td.device.type == "meta" else "cpu"
    names = td.names if td._has_names() else None
    return _make_tensordict, (dict(td._tensordict), tuple(td.batch_size), device, names, td.is_locked)


# --- numpy arrays ------------------------------------------------------------------------------------------------


def _make_array(buffer: _Buffer, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    if buffer is None:
        return np.empty(shape, dtype=dtype, order=order)
    array: np.ndarray[Any, Any] = _bytes_over(buffer, max(dtype.alignment, 1)).view(dtype)
    return array.reshape(shape, order=order)


def reduce_array(array: np.ndarray[Any, Any]) -> Reduced | None:
    """Describe an array of fixed-size elements; None leaves object arrays and the like to numpy's own pickling."""
    dtype = array.dtype
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind not in "biufcmMSUV":
        return None
    array = array.view(np.ndarray)  # memmap: what travels is the data, the file is on this machine
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    described = dtype.str if dtype.kind != "V" else dtype
    if array.size == 0:
        return _make_array, (None, described, array.shape, order)
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1).view(np.uint8)
    return _make_array, (_frame(flat), described, array.shape, order)


#: The functions above that make data from plain arguments and run nothing else.
PLAIN_MAKERS: tuple[Callable[..., Any], ...] = (
    _make_tensor,
    _make_parameter,
    _make_meta,
    _make_jagged,
    _make_nested,
    _make_coo,
    _make_compressed,
    _make_tensordict,
    _make_array,
)


# --- one entry ---------------------------------------------------------------------------------------------------

_EXACT: dict[type, Callable[[Any], Reduced | None]] = {
    torch.Tensor: reduce_tensor,
    np.ndarray: reduce_array,
    np.memmap: reduce_array,
    TensorDict: reduce_tensordict,
}


def reduce_value(value: Any) -> Reduced | None:
    """Return the pickle description of a tensor, TensorDict, array or DataProto; None for everything else."""
    reducer = _EXACT.get(type(value))
    if reducer is not None:
        return reducer(value)
    if isinstance(value, torch.Tensor):
        return reduce_tensor(value)
    # DataProto and kin say themselves what they consist of, so that this module need not know them.
    own = getattr(type(value), "_pack_reduce_", None)
    return None if own is None else own(value)
