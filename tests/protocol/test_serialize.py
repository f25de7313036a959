"""Bytes: all comes back bit for bit, views cost what they show, nothing large is copied, errors name the place."""

from __future__ import annotations

import asyncio
import enum
import pickle
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from dask.sizeof import sizeof
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol import deserialize, serialize, to_serialize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, NonTensorStack, TensorDict

from dask_controller.errors import UnsupportedTypeError, WireFormatError
from dask_controller.protocol import reducers
from dask_controller.protocol.data_proto import DataProto, DataProtoItem
from dask_controller.protocol.serialize import FORMAT_VERSION, Packed, pack, unpack

quick = settings(deadline=None, max_examples=50)

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.complex32"))
    },
    key=str,
)


def travelled(packed: Packed) -> Packed:
    """The same bytes as another process gets them: private, and read-only as a network library may give them."""
    return Packed(bytes(packed.header), [bytes(frame) for frame in packed.frames])


def round_trip(value: Any) -> Any:
    return unpack(travelled(pack(value)))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(reducers.raw_bytes(tensor))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def assert_same_tensor(left: torch.Tensor, right: torch.Tensor) -> None:
    assert type(left) is type(right)
    assert left.dtype == right.dtype and left.shape == right.shape and left.requires_grad == right.requires_grad
    assert bits(left) == bits(right)


# --- tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 5), (7,), (3, 2, 4), (300, 5)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    assert_same_tensor(round_trip(tensor), tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_half() -> None:
    tensor = random_tensor(torch.complex32, (5, 2))
    assert_same_tensor(round_trip(tensor), tensor)


def test_views_of_every_kind_have_equal_values() -> None:
    base = torch.arange(2400.0).view(40, 60)
    complexes = torch.complex(base, base + 1)
    cases = {
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "expanded": base[:, :1].expand(40, 7),
        "conj": complexes.conj(),
        "neg": complexes.conj().imag,
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "offset": base[5:],
    }
    for name, tensor in cases.items():
        back = round_trip(tensor)
        assert torch.equal(back, tensor), name
        assert not back.is_conj() and not back.is_neg(), name


def test_a_small_view_of_a_large_tensor_is_small() -> None:
    large = torch.zeros(10_000_000)
    assert pack(large[:10]).nbytes < 1_000
    assert pack(large.view(-1, 10)[5:15]).nbytes < 1_000
    dp = DataProto.from_dict({"x": large.view(-1, 10)})
    assert pack(dp[:10]).nbytes < 100_000
    assert len(pickle.dumps(dp[:10])) < 100_000


def test_packing_does_not_copy_and_unpacking_makes_views() -> None:
    tensor, array = torch.arange(1_000_000), np.arange(1_000_000)
    packed = pack({"t": tensor, "a": array})
    assert len(packed.frames) == 2 and len(packed.header) < 1_000
    addresses = {np.frombuffer(frame, np.uint8).ctypes.data for frame in packed.frames}
    assert addresses == {tensor.data_ptr(), array.ctypes.data}
    back = unpack(packed)
    assert back["t"].data_ptr() == tensor.data_ptr() and back["a"].ctypes.data == array.ctypes.data
    private = unpack(packed.copied())
    private["t"][0] = -1
    private["a"][0] = -1
    assert tensor[0] == 0 and array[0] == 0


def test_the_caller_may_still_resize_its_storage() -> None:
    tensor = torch.arange(1_000)
    pack(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().size() == 0


@pytest.mark.parametrize("shift", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.complex128], ids=str)
def test_frames_at_odd_addresses_give_aligned_tensors(shift: int, dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, (1_000,))
    packed = pack({"t": tensor, "a": np.arange(1_000)})
    frames = []
    for frame in packed.frames:
        room = bytearray(len(frame) + shift)
        room[shift:] = frame
        frames.append(memoryview(room)[shift:])
    back = unpack(Packed(packed.header, frames))
    assert bits(back["t"]) == bits(tensor)
    assert back["t"].data_ptr() % min(dtype.itemsize, 8) == 0 and back["a"].flags.aligned


def test_what_arrives_can_be_written() -> None:
    read_only = np.arange(1_000)
    read_only.flags.writeable = False
    back = round_trip({"t": torch.zeros(1_000), "small": torch.zeros(2), "a": read_only})
    back["t"] += 1
    back["small"] += 1
    back["a"] += 1
    assert back["t"].sum() == 1_000 and back["a"][0] == 1


def test_gradients_parameters_and_modules() -> None:
    leaf = torch.ones(3, requires_grad=True)
    back = round_trip(leaf)
    assert_same_tensor(back, leaf)
    assert round_trip(leaf * 2).requires_grad and round_trip(leaf * 2).grad_fn is None
    for flag in (True, False):
        parameter = torch.nn.Parameter(torch.ones(400, dtype=torch.bfloat16), requires_grad=flag)
        assert_same_tensor(round_trip(parameter), parameter)
    module = torch.nn.Linear(3, 4)
    for ours, theirs in zip(round_trip(module).parameters(), module.parameters(), strict=True):
        assert_same_tensor(ours, theirs)


def test_the_same_object_twice_stays_one() -> None:
    tensor, array, text = torch.zeros(1_000), np.zeros(1_000), "x" * 100_000
    packed = pack([tensor, tensor, array, array, text, text])
    back = unpack(packed)
    assert back[0] is back[1] and back[2] is back[3]
    assert packed.nbytes < 8_000 + 4_000 + 101_000


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_tensor_subclasses(tmp_path: Any) -> None:
    tagged = torch.arange(1_000).as_subclass(Tagged)
    tagged.note = "hello"  # type: ignore[attr-defined]
    back = round_trip(tagged)
    assert type(back) is Tagged and torch.equal(back, tagged) and back.note == "hello"
    assert pack(torch.zeros(1_000_000).as_subclass(Tagged)[:3]).nbytes < 1_000
    mapped = MemoryMappedTensor.from_tensor(torch.arange(1_000), filename=str(tmp_path / "m"))
    back = round_trip(mapped)
    assert type(back) is torch.Tensor and torch.equal(back, torch.arange(1_000))


def test_meta_tensors_keep_their_form() -> None:
    back = round_trip(torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))
    assert back.device.type == "meta" and back.shape == (3, 4) and back.dtype is torch.bfloat16


def rows(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.arange(float(index)).to(dtype) for index in range(1, count + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors(dtype: torch.dtype, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor(rows(30, dtype), layout=layout)
    back = round_trip(nested)
    assert back.layout == layout and back.dtype == dtype
    for ours, theirs in zip(back.unbind(), nested.unbind(), strict=True):
        assert_same_tensor(ours, theirs)


def test_nested_tensors_of_other_forms() -> None:
    matrices = torch.nested.nested_tensor([torch.rand(n, 4) for n in (3, 1, 5)], layout=torch.jagged)
    turned = matrices.transpose(1, 2)
    narrowed = torch.nested.narrow(
        torch.rand(3, 1_000), 1, torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), layout=torch.jagged
    )
    grads = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True)
    for nested in (matrices, turned, narrowed, grads):
        back = round_trip(nested)
        assert back.requires_grad == nested.requires_grad
        for ours, theirs in zip(back.unbind(), nested.unbind(), strict=True):
            assert torch.equal(ours, theirs)
    assert pack(narrowed).nbytes < 2_000


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors() -> None:
    dense = torch.eye(6) * torch.arange(6.0)
    for sparse in (
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 3)),
        dense.to_sparse_bsc((3, 2)),
    ):
        back = round_trip(sparse)
        assert back.layout == sparse.layout and back.shape == sparse.shape and back.dtype == sparse.dtype
        assert torch.equal(back.to_dense(), dense)
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    back = round_trip(twice)
    assert not back.is_coalesced() and torch.equal(back.to_dense(), twice.to_dense())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:.*quantized")
def test_quantized_tensors_are_refused_with_the_way_out() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedTypeError, match=r"\['q'\].*dequantize"):
        pack({"q": quantized})


def test_cuda_tensors_are_staged_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[Any] = []
    host = torch.arange(1_000)

    class OnDevice:
        device = types.SimpleNamespace(type="cuda")

        def detach(self) -> OnDevice:
            return self

        def cpu(self) -> torch.Tensor:
            staged.append(self)
            return host

    assert reducers.to_host(OnDevice()) is host  # type: ignore[arg-type]
    assert len(staged) == 1
    assert reducers.to_host(host).data_ptr() == host.data_ptr()
    # And packing goes that way: what to_host gives is what travels.
    monkeypatch.setattr(reducers, "to_host", lambda tensor: host)
    assert torch.equal(round_trip(torch.zeros(1_000, dtype=torch.int64)), host)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_cuda_tensors_arrive_on_the_cpu() -> None:
    td = TensorDict({"x": torch.arange(5_000, device="cuda")}, batch_size=[5_000], device="cuda")
    back = round_trip(DataProto(batch=td))
    assert back.batch.device == torch.device("cpu") and torch.equal(back.batch["x"], torch.arange(5_000))


# --- tensordicts, arrays, values ---------------------------------------------------------------------------------


def test_tensordicts() -> None:
    td = TensorDict(
        {
            "a": torch.arange(300),
            "nested": {"b": torch.rand(300, 2), ("deep", "c"): torch.zeros(300, 0)},
            "ragged": torch.nested.nested_tensor(rows(300), layout=torch.jagged),
            "word": NonTensorData("hello"),
            "words": NonTensorStack(*[[str(index)] for index in range(300)]),
        },
        batch_size=[300],
    )
    back = round_trip(td)
    assert type(back) is TensorDict and back.batch_size == td.batch_size and set(back.keys()) == set(td.keys())
    assert torch.equal(back["a"], td["a"]) and torch.equal(back["nested", "b"], td["nested", "b"])
    assert back["nested", "deep", "c"].shape == (300, 0)
    assert back["word"] == "hello" and list(back["words"]) == list(td["words"])
    assert torch.equal(back["ragged"].values(), td["ragged"].values())
    named = TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3], names=["x", "y"], device="cpu").lock_()
    back = round_trip(named)
    assert back.names == ["x", "y"] and back.device == torch.device("cpu") and back.is_locked
    lazy = LazyStackedTensorDict.lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.ones(3)})])
    back = round_trip(lazy)
    assert torch.equal(back[1]["a"], torch.ones(3))
    empty = round_trip(TensorDict({}, batch_size=[4]))
    assert empty.batch_size == (4,)


@quick
@given(
    array=hnp.arrays(
        dtype=st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes(), hnp.array_dtypes()),
        shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=6),
    )
)
def test_any_array_comes_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    for form in (array, array.T, array[::-1] if array.ndim else array, np.asfortranarray(array)):
        back = round_trip(form)
        assert back.dtype == form.dtype and back.shape == form.shape
        assert back.tobytes() == form.tobytes()


def test_arrays_that_are_not_plain() -> None:
    large = np.zeros((1_000_000, 2))
    assert pack(large[:5]).nbytes < 1_000
    fortran = np.asfortranarray(np.random.default_rng(0).random((50, 60)))
    assert round_trip(fortran).flags.f_contiguous
    masked = np.ma.masked_array(np.arange(5), mask=[0, 1, 0, 0, 1])
    assert (round_trip(masked) == masked).all() and round_trip(masked).mask.tolist() == masked.mask.tolist()
    texts = np.array(["a", "bb" * 100], dtype=np.dtypes.StringDType())
    assert (round_trip(texts) == texts).all()
    times = np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]")
    assert round_trip(times).tobytes() == times.tobytes()


@pytest.mark.parametrize(
    "elements",
    [
        [[1, 2], [3, 4]],
        ["a", None, "b", 3],
        ["x"] * 1_000,
        [f"row {index} \ud800 é" for index in range(1_000)],
        [b"\x00", b"abc"],
        [{"k": [1]}, {}],
        [np.arange(3), np.arange(3)],
        [],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_object_columns_keep_form_and_types(elements: list[Any]) -> None:
    column = np.fromiter(elements, dtype=object, count=len(elements))
    back = round_trip(column)
    assert back.dtype == object and back.shape == (len(elements),)
    assert [type(item) for item in back] == [type(item) for item in elements]
    assert [item.tolist() if isinstance(item, np.ndarray) else item for item in back] == [
        item.tolist() if isinstance(item, np.ndarray) else item for item in elements
    ]


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**100, 1.5, 1j, "text", b"bytes", bytearray(b"b"), (), (1, "a"), [1, [2]], {"x": {1: 2}},
        {1, 2}, frozenset({1}), np.float32(1.5), np.int64(3), Colour.RED, torch.bfloat16, torch.Size([1, 2]),
        slice(1, 2), range(3), {"deep": [[[[["x"]]]]]}, list(range(100)),
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_keep_their_type(value: Any) -> None:
    back = round_trip(value)
    assert back == value and type(back) is type(value)


def test_functions_of_this_module_and_lambdas() -> None:
    factor = 3
    assert round_trip(lambda x: x * factor)(2) == 6
    assert round_trip(random_tensor) is random_tensor


# --- references --------------------------------------------------------------------------------------------------


class Ticket:
    def __init__(self, name: str) -> None:
        self.name = name


def test_references_are_left_out_and_put_back_anywhere() -> None:
    a, b = Ticket("a"), Ticket("b")
    value = {"first": a, "list": [b, {"deep": (a,)}], "column": np.array([b, 1], dtype=object), "t": torch.zeros(1_000)}
    packed = pack(value, is_ref=lambda obj: isinstance(obj, Ticket))
    assert packed.refs == [a, b]
    back = unpack(travelled(packed), refs=["A", torch.ones(2)])
    assert back["first"] == "A" and back["list"][1]["deep"] == ("A",)
    assert torch.equal(back["column"][0], torch.ones(2)) and back["list"][0] is back["column"][0]


def test_a_reference_alone() -> None:
    packed = pack(Ticket("a"), is_ref=lambda obj: isinstance(obj, Ticket))
    assert unpack(packed, refs=[5]) == 5
    with pytest.raises(WireFormatError, match="refer to value 0"):
        unpack(packed)
    with pytest.raises(WireFormatError):
        unpack(pack([Ticket("a"), Ticket("b")], is_ref=lambda obj: isinstance(obj, Ticket)), refs=[5])


# --- errors ------------------------------------------------------------------------------------------------------


def test_the_error_names_the_place_and_keeps_the_cause() -> None:
    lock = threading.Lock()
    with pytest.raises(UnsupportedTypeError, match=r"\['a'\]\[1\].*lock.*cannot be sent") as caught:
        pack({"a": [1, lock]})
    assert isinstance(caught.value.__cause__, TypeError)
    dp = DataProto.from_dict({"x": torch.zeros(2)}, {"o": [1, lock]}, {"m": 1})
    with pytest.raises(UnsupportedTypeError, match=r"\.non_tensor_batch\['o'\]\[1\]"):
        pack((dp,))
    with pytest.raises(UnsupportedTypeError, match="closure lock"):
        pack(lambda: lock)
    with pytest.raises(UnsupportedTypeError, match=r"\.name"):
        pack([Ticket(lock)])  # type: ignore[arg-type]


class Hostile:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def test_errors_of_foreign_pickling_code_are_ours() -> None:
    with pytest.raises(UnsupportedTypeError, match="not me"):
        pack([Hostile()])
    cycle: list[Any] = []
    cycle.append(cycle)
    back = round_trip(cycle)
    assert back[0] is back


class Exhausting:
    def __reduce__(self) -> Any:
        raise MemoryError


def test_running_out_of_memory_blames_no_value() -> None:
    with pytest.raises(MemoryError):
        pack([Exhausting()])


@pytest.mark.parametrize("header", [b"", b"\x01", b"\x00abc", b"\x01garbage"])
def test_bytes_that_are_not_ours(header: bytes) -> None:
    with pytest.raises(WireFormatError):
        unpack(Packed(header))


def test_newer_versions_and_missing_frames() -> None:
    packed = pack(torch.zeros(1_000))
    newer = bytes([FORMAT_VERSION + 1]) + packed.header[1:]
    with pytest.raises(WireFormatError, match=f"version {FORMAT_VERSION + 1}"):
        unpack(Packed(newer, packed.frames))
    with pytest.raises(WireFormatError, match="0 frames"):
        unpack(Packed(packed.header, []))
    with pytest.raises(WireFormatError):
        unpack(Packed(packed.header[:-5], packed.frames))


# --- Dask --------------------------------------------------------------------------------------------------------


def through_comm(message: Any) -> Any:
    async def send() -> Any:
        frames = await to_frames(message)
        return await from_frames([bytearray(frame) for frame in frames])

    return asyncio.run(send())


def test_a_packed_value_passes_through_a_message_unopened() -> None:
    packed = pack({"x": torch.arange(1_000), "boom": Ticket("a")})
    back = through_comm({"op": "call", "args": to_serialize(packed)})["args"]
    assert type(back) is Packed and back.header == packed.header
    assert [bytes(frame) for frame in back.frames] == [bytes(frame) for frame in packed.frames]
    value = unpack(back)
    value["x"][0] = 7
    assert value["x"][:2].tolist() == [7, 1]


@pytest.mark.parametrize("through", ["serialize", "comm"])
def test_batches_travel_by_dask_as_raw_frames(through: str) -> None:
    ragged = torch.nested.nested_tensor(rows(300), layout=torch.jagged)
    dp = DataProto.from_dict(
        {"x": torch.rand(300, 50).to(torch.bfloat16), "r": ragged}, {"name": ["n"] * 300}, {"step": 3}
    )
    if through == "serialize":
        header, frames = serialize(dp)
        assert header["serializer"] == "dask"
        back = deserialize(header, [bytearray(frame) for frame in frames])
    else:
        back = through_comm({"data": to_serialize(dp)})["data"]
    assert type(back) is DataProto and bits(back.batch["x"]) == bits(dp.batch["x"])
    assert back.non_tensor_batch["name"].tolist() == ["n"] * 300 and back.meta_info == {"step": 3}
    back.batch["x"].fill_(0)
    assert torch.equal(back.batch["r"].values(), ragged.values())


def test_tensordicts_travel_by_dask() -> None:
    td = TensorDict({"x": torch.rand(300).to(torch.float8_e4m3fn)}, batch_size=[300])
    header, frames = serialize(td)
    assert header["serializer"] == "dask"
    back = deserialize(header, [bytearray(frame) for frame in frames])
    assert bits(back["x"]) == bits(td["x"])


def test_packed_can_be_pickled_with_and_without_buffers() -> None:
    packed = pack(torch.arange(10_000))
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1_000 and len(buffers) == 1
    assert torch.equal(unpack(pickle.loads(stream, buffers=buffers)), torch.arange(10_000))
    for protocol in (2, 5):
        again = pickle.loads(pickle.dumps(packed, protocol=protocol))
        assert torch.equal(unpack(again), torch.arange(10_000))
    assert repr(packed) == f"<Packed: {packed.nbytes} bytes, 1 frames, 0 refs>"


def test_batches_by_plain_pickle(tmp_path: Any) -> None:
    dp = DataProto.from_dict({"x": torch.arange(10_000)}, {"o": [[1]] * 10_000}, {"s": 1})
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps([dp], protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1 and buffers[0].raw().nbytes == 80_000
    back = pickle.loads(stream, buffers=buffers)[0]
    assert back.batch["x"].data_ptr() == dp.batch["x"].data_ptr()
    for protocol in (2, 3, 4, 5):
        back = pickle.loads(pickle.dumps(dp, protocol=protocol))
        assert torch.equal(back.batch["x"], dp.batch["x"]) and back.meta_info == {"s": 1}
    torch.save(dp, tmp_path / "dp.pt")
    assert len(torch.load(tmp_path / "dp.pt", weights_only=False)) == 10_000
    item = round_trip(dp[3])
    assert type(item) is DataProtoItem and item.batch["x"] == 3


class Extended(DataProto):
    """A user's subclass."""


def test_subclasses_and_their_attributes_travel() -> None:
    dp = Extended.from_dict({"x": torch.arange(3)})
    dp.extra = 5  # type: ignore[attr-defined]
    for back in (round_trip(dp), pickle.loads(pickle.dumps(dp))):
        assert type(back) is Extended and back.extra == 5


def test_sizes_that_dask_sees() -> None:
    dp = DataProto.from_dict({"x": torch.zeros(1_000_000)[:1_000]}, {"o": ["abc"] * 1_000})
    assert 4_000 < sizeof(dp) < 400_000
    packed = pack(torch.zeros(1_000))
    assert sizeof(packed) == packed.nbytes > 4_000


def test_equal_batches_get_keys_of_their_own() -> None:
    from dask.base import tokenize

    dp = DataProto.from_dict({"x": torch.zeros(3)})
    assert tokenize(dp) != tokenize(dp)
