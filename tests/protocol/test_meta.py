"""meta_info of many ranks: joined by the documented rule, and no comparison ever raises."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from tensordict import TensorDict

from dask_controller.errors import KeyConflictError
from dask_controller.protocol import DataProto, RankValues, list_of_dict_to_dict_of_list, pack, unpack
from dask_controller.protocol.meta import AUTO_PADDING_KEY, copy_containers, equal_values, join_meta


def joined(*metas: dict[str, Any]) -> dict[str, Any]:
    """Join through DataProto.concat, as collect does."""
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, meta_info=meta) for meta in metas]
    return DataProto.concat(parts).meta_info


# --- the rule ----------------------------------------------------------------------------------------------------


def test_keys_of_all_ranks_and_metrics_in_rank_order() -> None:
    meta = joined(*[{f"k{rank}": rank, "metrics": {"loss": rank}} for rank in range(4)])
    assert meta == {"k0": 0, "k1": 1, "k2": 2, "k3": 3, "metrics": {"loss": [0, 1, 2, 3]}}


def test_metrics_in_every_form() -> None:
    assert joined({"metrics": [{"a": 1}, {"a": 2}]}, {"metrics": {"a": 3}})["metrics"] == {"a": [1, 2, 3]}
    assert joined({"metrics": {"a": 1}}, {}, {"metrics": None}, {"metrics": {"b": 2}})["metrics"] == {
        "a": [1],
        "b": [2],
    }
    assert joined({"metrics": {"a": [1, 2]}}, {"metrics": {"a": [3]}})["metrics"] == {"a": [[1, 2], [3]]}
    assert "metrics" not in joined({"metrics": None}, {})
    assert joined({"metrics": {"a": 1}})["metrics"] == {"a": [1]}
    assert joined({"metrics": 5}, {"metrics": 5})["metrics"] == 5


class Config:
    """Compared by identity, as most user classes are."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: np.float32("nan"),
        lambda: torch.arange(3),
        lambda: torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.tensor(float("nan")),
        lambda: torch.complex(torch.ones(2), torch.full((2,), float("nan"))),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: np.arange(3),
        lambda: np.array([np.nan, 1]),
        lambda: np.array([[1], None, float("nan"), np.array([np.nan])], dtype=object),
        lambda: np.array(["NaT"], dtype="datetime64[s]"),
        lambda: TensorDict({"a": torch.full((2,), float("nan"))}, [2]),
        lambda: pd.DataFrame({"a": [1.0, np.nan]}),
        lambda: pd.NA,
        lambda: Config([float("nan"), {"deep": np.arange(2)}]),
        lambda: {"deep": [float("nan"), (np.arange(2), {torch.float32})]},
        lambda: None,
        lambda: "text",
        lambda: DataProto.from_dict({"x": torch.arange(2)}),
    ],
    ids=range(22),
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_equal_values_are_kept_once(make: Any) -> None:
    meta = joined({"v": make()}, {"v": make()}, {"v": make()})
    assert equal_values(meta["v"], make()) and not isinstance(meta["v"], RankValues)


def test_numbers_that_differ_become_one_value_per_rank() -> None:
    timings = [73.94637 + rank * 1e-5 for rank in range(4)]
    assert joined(*[{"timing": timing} for timing in timings]) == {"timing": timings}
    assert joined({"n": 1}, {}, {"n": 2.5})["n"] == [1, 2.5]
    assert joined({"n": 1}, {"n": 1.0})["n"] == 1
    values = joined({"n": np.float32(1)}, {"n": torch.tensor(2)}, {"n": float("nan")})["n"]
    assert values[0] == 1 and values[1] == 2 and math.isnan(values[2]) and type(values[0]) is np.float32
    assert joined({"timing": {"gen": 1.5, "n": 1}}, {"timing": {"gen": 2.5, "n": 1}}) == {
        "timing": {"gen": [1.5, 2.5], "n": 1}
    }


def test_joining_joined_batches_gives_one_flat_list() -> None:
    left, right = joined({"t": 1}, {"t": 2}), joined({"t": 3}, {"t": 4})
    assert type(left["t"]) is RankValues
    assert joined(left, right) == {"t": [1, 2, 3, 4]} == joined({"t": 1}, {"t": 2}, {"t": 3}, {"t": 4})
    assert joined(unpack(pack(left)), right, {"t": 5})["t"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("a", "b"),
        (True, False),
        (True, 1),
        (None, 1),
        ([1, 2], [1, 3]),
        ([1, 2], (1, 2)),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.arange(3.0)),
        (torch.arange(3), torch.arange(3) + 1),
        (torch.zeros(2), torch.zeros(3)),
        (torch.arange(3), np.arange(3)),
        (Config(1), Config(2)),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})),
        ({"a": 1}, [1]),
    ],
    ids=repr,
)
def test_conflicts_name_key_ranks_and_values(first: Any, other: Any) -> None:
    with pytest.raises(KeyConflictError, match=r"(?s)meta_info\['v'\].*ranks 0, 2: .*rank 1: ") as caught:
        joined({"v": first}, {"v": other}, {"v": first})
    assert "metrics" in str(caught.value)


def test_conflicts_inside_dicts_and_of_many_ranks() -> None:
    with pytest.raises(KeyConflictError, match=r"meta_info\['a'\]\['b'\]"):
        joined({"a": {"b": "x", "c": 1}}, {"a": {"b": "y"}})
    with pytest.raises(KeyConflictError, match=r"(?s)12 different values.*and 4 more"):
        joined(*[{"v": str(rank)} for rank in range(12)])
    with pytest.raises(KeyConflictError, match=r"<array \(1000,\) int64>"):
        joined({"v": np.arange(1_000)}, {"v": np.arange(1_000) + 1})


class Hostile:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")

    def __repr__(self) -> str:
        raise RuntimeError("do not print me")

    __hash__ = None  # type: ignore[assignment]


def test_a_comparison_that_raises_is_a_difference() -> None:
    assert not equal_values(Hostile(), Hostile())
    with pytest.raises(KeyConflictError, match="Hostile whose repr fails"):
        joined({"v": Hostile()}, {"v": Hostile()})
    same = Hostile()
    assert joined({"v": same}, {"v": same})["v"] is same


def test_the_padding_switch_is_on_if_any_rank_has_it() -> None:
    assert joined({AUTO_PADDING_KEY: True}, {AUTO_PADDING_KEY: False}, {})[AUTO_PADDING_KEY] is True


def test_joining_changes_no_input_and_shares_no_container() -> None:
    metas: list[dict[str, Any]] = [{"a": {"b": [1]}, "metrics": {"x": [1]}}, {"a": {"b": [1]}, "metrics": {"x": [2]}}]
    result = join_meta(metas)
    result["a"]["b"].append(2)
    result["metrics"]["x"][0].append(3)
    assert metas == [{"a": {"b": [1]}, "metrics": {"x": [1]}}, {"a": {"b": [1]}, "metrics": {"x": [2]}}]
    assert join_meta([]) == {}


# --- comparison and copies ---------------------------------------------------------------------------------------


def test_what_is_not_equal() -> None:
    for left, right in [
        (1, True),
        (0.0, False),
        ("1", 1),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2).to_sparse()),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), torch.ones(1, 1)),
        (TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"b": torch.zeros(2)}, [2])),
        (TensorDict({"a": torch.zeros(2)}, [2]), {"a": torch.zeros(2)}),
        (object(), object()),
        (np.array([1], dtype=object), np.array([2], dtype=object)),
        (torch.ones(2).to(torch.float8_e5m2), torch.zeros(2).to(torch.float8_e5m2)),
    ]:
        assert not equal_values(left, right) and not equal_values(right, left)


def test_cycles_are_compared_and_copied() -> None:
    def ring(end: int) -> list[Any]:
        value: list[Any] = [1]
        value.append({"back": value, "end": end})
        return value

    assert equal_values(ring(1), ring(1)) and not equal_values(ring(1), ring(2))
    loops = [np.array([None, end], dtype=object) for end in (1, 1, 2)]
    for loop in loops:
        loop[0] = loop
    assert equal_values(loops[0], loops[1]) and not equal_values(loops[0], loops[2])
    copied = copy_containers(ring(1))
    assert copied[1]["back"] is copied


class Point(NamedTuple):
    x: Any
    y: Any


def test_copies_keep_types_and_share_leaves() -> None:
    tensor = torch.zeros(2)
    counts = collections.defaultdict(list, {"a": [1]})
    ordered = collections.OrderedDict(a=[1])
    value = {"t": tensor, "c": counts, "o": ordered, "p": Point([1], 2), "s": {1}, "tt": (1, "a"), "f": frozenset({1})}
    copied = copy_containers(value)
    assert copied == value and copied["t"] is tensor and copied["tt"] is value["tt"]
    assert type(copied["c"]) is collections.defaultdict and copied["c"]["new"] == []
    assert type(copied["o"]) is collections.OrderedDict and type(copied["p"]) is Point
    copied["c"]["a"].append(2)
    copied["o"]["a"].append(2)
    copied["p"].x.append(2)
    copied["s"].add(2)
    assert counts == {"a": [1]} and ordered == {"a": [1]} and value["p"] == Point([1], 2) and value["s"] == {1}


def test_list_of_dict_to_dict_of_list() -> None:
    assert list_of_dict_to_dict_of_list([]) == {}
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 4, "a": 3}]) == {"a": [1, 3], "b": [2, 4]}
    with pytest.raises(KeyConflictError, match=r"Dict 1 .*missing \['b'\], unexpected \['c'\]"):
        list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 1, "c": 3}])
