"""Several classes in one process per rank: three ways to call a role, roles that see each other, fused classes."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
from distributed import Client

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    Dispatch,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    errors,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


def make_group(client: Client, cia: DaskClassWithInitArgs, ranks: int = 2) -> DaskWorkerGroup:
    return DaskWorkerGroup(DaskResourcePool([ranks], use_gpu=False), cia, client=client)


def rows(n: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(n)})


class Actor(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: float) -> float:
        self.total += 1
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def add_async(self, x: float) -> float:
        await asyncio.sleep(0)
        return x + self.rank + 0.5

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def where(self) -> tuple[int, int, str]:
        return self.rank, os.getpid(), self.get_master_addr_port()[1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_critic(self, x: float) -> float:
        critic = self.get_fused_worker_by_name("critic")
        assert critic is self.fused_worker_dict["critic"]
        assert sorted(self.fused_worker_dict) == ["actor", "critic"]
        assert self.get_fused_worker_by_name("rollout") is None
        return float(critic.sub(x))


class Critic(Worker):
    def __init__(self, val: float, *, scale: float = 1.0) -> None:
        super().__init__()
        self.val = val * scale

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sub(self, x: float) -> float:
        return x - self.val

    def unmarked(self, x: float) -> tuple[int, float]:
        return self.rank, x - self.val


def roles() -> dict[str, DaskClassWithInitArgs]:
    return {"actor": DaskClassWithInitArgs(Actor), "critic": DaskClassWithInitArgs(Critic, 5, scale=2.0)}


def test_three_ways_to_a_role_give_what_separate_groups_give(client: Client) -> None:
    with make_group(client, roles()["actor"]) as actor, make_group(client, roles()["critic"]) as critic:
        expected = (actor.add(1.0), actor.add_async(1.0), actor.double(rows(4)).batch["x"].tolist(), critic.sub(x=1.0))
    assert expected == ([1.0, 2.0], [1.5, 2.5], [0, 2, 4, 6], [-9.0, -9.0])
    with make_group(client, create_colocated_worker_cls(roles())) as group:
        views = group.spawn({"actor", "critic"})
        assert sorted(views) == ["actor", "critic"]
        for actor, critic in [(views["actor"], views["critic"]), (group.actor, group.critic)]:
            assert actor.add(1.0) == expected[0]
            assert actor.add_async(1.0) == expected[1]
            assert actor.double(data=rows(4)).batch["x"].tolist() == expected[2]
            assert critic.sub(x=1.0) == expected[3]
        assert group.actor_add(1.0) == expected[0]
        assert group.actor_add_async(1.0) == expected[1]
        assert group.actor_double(rows(4)).batch["x"].tolist() == expected[2]
        assert group.critic_sub([1.0, 2.0]) == [-9.0, -8.0]
        assert group.actor.execute_all_sync("add", [1.0, 2.0]) == [1.0, 3.0]
        assert {"actor", "critic", "actor_add", "critic_sub"} <= set(dir(group))


def test_roles_are_in_one_process_with_one_rank_and_see_each_other(client: Client) -> None:
    with make_group(client, create_colocated_worker_cls({**roles(), "twin": DaskClassWithInitArgs(Actor)})) as group:
        assert group.actor.where() == group.twin.where()
        assert group.actor.where()[0] == 0
        assert group.actor.where()[2] == group.master_port
        assert group.actor.add(1.0) == [1.0, 2.0]
        # The second Actor is an object of its own.
        totals = [role.execute_all_sync("__getattribute__", "total") for role in (group.actor, group.twin)]
        assert totals == [[1, 1], [0, 0]]
    with make_group(client, create_colocated_worker_cls(roles())) as group:
        assert group.actor.ask_critic(1.0) == [-9.0, -9.0]


def test_a_view_is_a_group_of_its_role(inproc_client: Client) -> None:
    with make_group(inproc_client, create_colocated_worker_cls(roles())) as group:
        view = group.spawn(["critic"])["critic"]
        assert view.world_size == 2
        assert view.execute_all_sync("unmarked", 1.0) == [(0, -9.0), (1, -9.0)]
        assert view.execute_rank_zero_sync("unmarked", 2.0) == (0, -8.0)
        assert view.workers[1].unmarked(3.0) == (1, -7.0)
        with pytest.raises(AttributeError, match="has no member 'add'"):
            view.add(1.0)
        with pytest.raises(errors.NotRegisteredError, match=r"Critic\.unmarked is not marked"):
            view.unmarked(1.0)
        assert "role 'critic'" in repr(view)


def test_closing_a_view_leaves_the_others(inproc_client: Client) -> None:
    with make_group(inproc_client, create_colocated_worker_cls(roles())) as group:
        view = group.spawn(["actor"])["actor"]
        view.close()
        with pytest.raises(errors.GroupClosedError, match="add"):
            view.add(1.0)
        assert group.critic.sub(1.0) == [-9.0, -9.0]
    with pytest.raises(errors.GroupClosedError, match="sub"):
        group.critic.sub(1.0)


def test_a_view_keeps_the_ranks_alive(inproc_client: Client) -> None:
    group = make_group(inproc_client, create_colocated_worker_cls(roles()))
    view = group.spawn(["critic"])["critic"]
    del group
    assert view.sub(1.0) == [-9.0, -9.0]


# ---------------------------------------------------------------------- fused


FusedBase = create_colocated_worker_raw_cls(roles())


class Hybrid(FusedBase):  # type: ignore[valid-type, misc]
    """Methods over both roles."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def foo(self, x: float) -> float:
        return float(self.critic.sub(self.actor.add(x))) * self.factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def actor_add_async(self, x: float) -> str:
        """In place of the role's own."""
        return f"hybrid {x + self.rank}"


def test_a_fused_class_uses_its_roles(client: Client) -> None:
    cia = DaskClassWithInitArgs(Hybrid, factor=2.0)
    cia.fused_worker_used = True
    with make_group(client, cia) as group:
        group.fuse(roles())
        x = group.actor.add(0.5)
        assert x == [0.5, 1.5]
        assert group.critic.sub(x) == [-9.5, -8.5]
        assert group.foo(0.5) == [-19.0, -17.0]
        assert group.actor_add(0.5) == [0.5, 1.5]
        assert group.actor_add_async(0.5) == ["hybrid 0.5", "hybrid 1.5"]
        assert group.actor.add_async(0.5) == [1.0, 2.0]


def test_fused_classes_are_marked_so() -> None:
    assert create_colocated_worker_cls_fused(roles()).fused_worker_used
    assert not create_colocated_worker_cls(roles()).fused_worker_used
    assert issubclass(Hybrid, Worker)


def test_a_fused_class_without_a_subclass(inproc_client: Client) -> None:
    with make_group(inproc_client, create_colocated_worker_cls_fused(roles())) as group:
        group.fuse(["actor"])
        assert group.actor.add(1.0) == [1.0, 2.0]
        assert group.critic.sub(1.0) == [-9.0, -9.0]


# ---------------------------------------------------------------------- meshes


class Train(Worker):
    def __init__(self) -> None:
        self._register_dispatch_collect_info("mesh", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="mesh"))
    def tag(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            tensors={"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)}, meta_info={"seen": len(data)}
        )


class Infer(Train):
    def __init__(self) -> None:
        self._register_dispatch_collect_info("mesh", dp_rank=0, is_collect=self.rank == 3)


def test_each_role_has_its_own_layout_under_the_same_mesh_name(inproc_client: Client) -> None:
    cia = create_colocated_worker_cls({"train": DaskClassWithInitArgs(Train), "infer": DaskClassWithInitArgs(Infer)})
    with make_group(inproc_client, cia, 4) as group:
        views = group.spawn({"train", "infer"})
        for call in (views["train"].tag, group.train.tag, group.train_tag):
            out = call(rows(4))
            assert out.batch["x"].tolist() == [0, 1, 2, 3]
            assert out.batch["rank"].tolist() == [0, 0, 2, 2]
            assert out.meta_info["seen"] == 2
        for call in (views["infer"].tag, group.infer.tag, group.infer_tag):
            out = call(data=rows(4))
            assert out.batch["rank"].tolist() == [3, 3, 3, 3]
            assert out.meta_info["seen"] == 4
        assert views["train"]._dispatch_info == {"mesh": [0, 0, 1, 1]}
        assert views["infer"]._dispatch_info == {"mesh": [0, 0, 0, 0]}


# ---------------------------------------------------------------------- mistakes


class NoSuper(FusedBase):  # type: ignore[valid-type, misc]
    def __init__(self) -> None:
        self.factor = 1.0


def test_a_subclass_that_forgets_super_says_so(inproc_client: Client) -> None:
    with make_group(inproc_client, DaskClassWithInitArgs(NoSuper)) as group:
        with pytest.raises(errors.RankFailedError, match=r"NoSuper has no role 'actor'.*super\(\).__init__\(\)"):
            group.actor.add(1.0)


class Method(Worker):
    @register
    def b_c(self) -> None: ...


class Other(Worker):
    @register
    def c(self) -> None: ...


class Statuses(Worker):
    @register
    def status(self) -> None: ...


def wrap(cls: Any) -> DaskClassWithInitArgs:
    return DaskClassWithInitArgs(cls)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({}, "at least one role"),
        ({"my role": wrap(Actor)}, "a role is a Python name.*'my role'"),
        ({"class": wrap(Actor)}, "a role is a Python name.*'class'"),
        ({1: wrap(Actor)}, "a role is a Python name.*1"),
        ({"actor": Actor}, "role 'actor' needs a DaskClassWithInitArgs, got type"),
        ({"rank": wrap(Actor)}, "role 'rank' has the name of a member of Worker"),
        ({"a": wrap(Method), "a_b": wrap(Other)}, "roles 'a' and 'a_b' both give a method 'a_b_c'"),
    ],
)
def test_roles_that_cannot_work_are_refused(bad: Any, complaint: str) -> None:
    for make in (create_colocated_worker_cls, create_colocated_worker_cls_fused, create_colocated_worker_raw_cls):
        with pytest.raises(errors.RegistrationError, match=complaint):
            make(bad)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"workers": wrap(Actor)}, "role 'workers' has the name of a member of groups"),
        ({"actor": wrap(Statuses)}, r"Statuses\.status is marked.*groups have a member 'status'"),
        ({"execute": wrap(type("All", (Worker,), {"all": register(lambda self: None)}))}, "execute_all.*of their own"),
    ],
)
def test_roles_that_clash_with_the_group_are_refused_before_any_rank_is_made(
    inproc_client: Client, bad: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("dask_controller.group.group.start_group", lambda *args, **kwargs: started.append(args))
    with pytest.raises(errors.RegistrationError, match=complaint):
        make_group(inproc_client, create_colocated_worker_cls(bad))
    assert not started


def test_a_role_that_is_not_there(inproc_client: Client) -> None:
    with make_group(inproc_client, create_colocated_worker_cls(roles())) as group:
        for ask in (group.spawn, group.fuse):
            with pytest.raises(errors.RegistrationError, match=r"no role 'rollout'; roles: \['actor', 'critic'\]"):
                ask(["rollout"])
        with pytest.raises(AttributeError, match="no member 'actr'.*actor"):
            group.actr  # noqa: B018
    with make_group(inproc_client, DaskClassWithInitArgs(Actor)) as group:
        with pytest.raises(errors.RegistrationError, match="roles: none.*create_colocated_worker_cls"):
            group.spawn(["actor"])


class Fails(Worker):
    def __init__(self) -> None:
        if self.rank == 1:
            raise ValueError("no weights")


def test_a_role_whose_init_fails_fails_the_start(inproc_client: Client) -> None:
    cia = create_colocated_worker_cls({"actor": DaskClassWithInitArgs(Actor), "bad": DaskClassWithInitArgs(Fails)})
    with pytest.raises(errors.RankFailedError, match="rank 1.*no weights") as caught:
        make_group(inproc_client, cia)
    assert list(caught.value.failures) == [1]


def test_options_and_resources_of_roles_are_joined() -> None:
    first, second = DaskClassWithInitArgs(Actor), DaskClassWithInitArgs(Critic, 1)
    first.update_options({"retries": 2})
    first.set_additional_resource({"NVME": 1, "NIC": 3})
    second.set_additional_resource({"NVME": 2})
    joined = create_colocated_worker_cls({"actor": first, "critic": second})
    assert joined.options == {"retries": 2}
    assert joined.additional_resources == {"NVME": 2, "NIC": 3}
