"""The parts of the GRPO demo that need no cluster: task, algorithm, model, learner, files."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import grpo_lib
import pytest
import torch
from grpo_lib import learner as learner_module
from grpo_lib.algorithm import clipped_objective, group_advantages, grpo_token_loss, kl_k3
from grpo_lib.arithmetic import (
    ALPHABET,
    EOS_ID,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    VOCAB_SIZE,
    Problem,
    decode,
    encode,
    encode_answers,
    is_well_formed,
    make_problems,
    response_mask,
    reward_of,
    split_problems,
)
from grpo_lib.learner import Learner, LearnerConfig, all_reduce_sum_
from grpo_lib.model import ModelConfig, Transformer, generate, response_log_probs
from grpo_lib.run_files import (
    append_record,
    keep_records,
    load_checkpoint,
    plot_curves,
    read_records,
    save_checkpoint,
)
from grpo_lib.schedule import deal_rows, draw_problems, row_seeds
from torch import Tensor

SMALL = ModelConfig(VOCAB_SIZE, PROMPT_LENGTH + RESPONSE_LENGTH, num_layers=2, num_heads=2, width=16)


# -- task ---------------------------------------------------------------------------------------------------------


def test_tokens_round_trip() -> None:
    assert decode(encode(ALPHABET)) == ALPHABET
    assert encode("47+85=") == [4, 7, 10, 8, 5, 11]
    assert decode([2, 3, 1, EOS_ID, 7]) == "231"


def test_a_foreign_character_is_named() -> None:
    with pytest.raises(ValueError, match="'x' in '4x'"):
        encode("4x")


def test_problems_are_all_sums_with_reversed_answers() -> None:
    problems = make_problems()
    assert len(problems) == len(set(problems)) == 90 * 90
    assert Problem("47+85=", "231") in problems
    for problem in problems:
        left, right = problem.prompt[:-1].split("+")
        assert int(problem.answer[::-1]) == int(left) + int(right)
        assert len(problem.prompt) == PROMPT_LENGTH and len(problem.answer) < RESPONSE_LENGTH


def test_held_out_problems_are_never_trained_on() -> None:
    problems = make_problems()
    train, held_out = split_problems(problems, 512, seed=3)
    assert len(held_out) == 512
    assert set(train) | set(held_out) == set(problems) and not set(train) & set(held_out)
    assert split_problems(problems, 512, seed=3) == (train, held_out)
    assert split_problems(problems, 512, seed=4)[1] != held_out


def test_answers_are_closed_and_filled() -> None:
    assert encode_answers(["231", "02"]).tolist() == [[2, 3, 1, EOS_ID], [0, 2, EOS_ID, EOS_ID]]
    assert encode_answers([]).shape == (0, RESPONSE_LENGTH)
    with pytest.raises(ValueError, match="no room"):
        encode_answers(["1234"])


def test_mask_covers_the_first_end_token_and_nothing_behind() -> None:
    responses = torch.tensor([[1, EOS_ID, EOS_ID, EOS_ID], [1, 2, 3, 4], [EOS_ID, 1, EOS_ID, 2]])
    assert response_mask(responses).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("response", "well_formed", "reward"),
    [
        ([2, 3, 1, EOS_ID], True, 1.0),
        ([2, 3, 2, EOS_ID], True, 0.0),  # wrong digit
        ([1, 3, 2, EOS_ID], True, 0.0),  # right digits, wrong order
        ([2, 3, EOS_ID, 1], True, 0.0),  # a digit missing; what follows the end does not count
        ([2, 3, 1, 0], False, 0.0),  # never ends
        ([2, 10, 1, EOS_ID], False, 0.0),  # "+" inside
        ([EOS_ID, EOS_ID, EOS_ID, EOS_ID], False, 0.0),  # empty
    ],
)
def test_reward(response: list[int], well_formed: bool, reward: float) -> None:
    assert is_well_formed(response) is well_formed
    assert reward_of(response, "231") == reward


def test_schedule_depends_on_seed_phase_and_step_only() -> None:
    drawn = draw_problems(1, "train", 5, 100, 30)
    assert len(set(drawn.tolist())) == 30 and drawn.min() >= 0 and drawn.max() < 100
    assert drawn.tolist() == draw_problems(1, "train", 5, 100, 30).tolist()
    for other in (
        draw_problems(2, "train", 5, 100, 30),
        draw_problems(1, "warmup", 5, 100, 30),
        draw_problems(1, "train", 6, 100, 30),
    ):
        assert drawn.tolist() != other.tolist()
    assert row_seeds(1, 5, 8).equal(row_seeds(1, 5, 8)) and not row_seeds(1, 5, 8).equal(row_seeds(1, 6, 8))
    assert (row_seeds(1, 5, 1000) >= 0).all()


@pytest.mark.parametrize("num_rows", [4, 7, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_mini_batches", [1, 2, 4])
def test_mini_batches_hold_the_same_rows_on_any_number_of_ranks(
    num_rows: int, num_ranks: int, num_mini_batches: int
) -> None:
    order, is_first = deal_rows(num_rows, num_ranks, num_mini_batches)
    assert len(order) % (num_ranks * num_mini_batches) == 0
    shape = (num_ranks, num_mini_batches, -1)
    order, is_first = order.view(shape), is_first.view(shape)
    alone, alone_first = (part.view(1, num_mini_batches, -1) for part in deal_rows(num_rows, 1, num_mini_batches))
    rows = []
    for index in range(num_mini_batches):
        mine = order[:, index][is_first[:, index]].tolist()
        assert mine == alone[:, index][alone_first[:, index]].tolist()
        rows += mine
    assert rows == list(range(num_rows))


# -- algorithm ----------------------------------------------------------------------------------------------------


def test_advantages_by_hand() -> None:
    # Group 1: mean 1/4, deviation sqrt(3)/4. Group 2: mean 1/2, deviation 1/2.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    expected = torch.tensor([3**0.5, *[-(3**-0.5)] * 3, 1.0, 1.0, -1.0, -1.0])
    torch.testing.assert_close(group_advantages(rewards, 4), expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_rewards_give_exactly_no_advantage(value: float) -> None:
    assert group_advantages(torch.full((6,), value), 3).tolist() == [0.0] * 6


@pytest.mark.parametrize(("num_rewards", "group_size"), [(6, 4), (4, 1), (4, 0)])
def test_advantages_refuse_what_is_no_group(num_rewards: int, group_size: int) -> None:
    with pytest.raises(ValueError, match="do not part into groups"):
        group_advantages(torch.zeros(num_rewards), group_size)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, 2.0),
        (1.5, 1.0, 1.2),  # no gain above 1 + clip
        (0.5, 1.0, 0.5),  # but the full loss below
        (0.5, -1.0, -0.8),  # no gain below 1 - clip
        (1.5, -1.0, -1.5),  # but the full loss above
        (1.1, 1.0, 1.1),
    ],
)
def test_clipped_objective_by_hand(ratio: float, advantage: float, expected: float) -> None:
    value = clipped_objective(torch.tensor([ratio]), torch.tensor([advantage]), 0.2)
    torch.testing.assert_close(value, torch.tensor([expected]))


def test_no_gradient_where_the_objective_is_clipped() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.1], requires_grad=True)
    clipped_objective(ratio, torch.tensor([1.0, -1.0, 1.0]), 0.2).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0.0, 0.0, 1.0]


def test_kl_estimate() -> None:
    policy, reference = torch.tensor([0.5, 0.5, 0.25]).log(), torch.tensor([0.25, 0.5, 0.5]).log()
    expected = torch.tensor([0.5 + math.log(2) - 1, 0.0, 2 - math.log(2) - 1])
    torch.testing.assert_close(kl_k3(policy, reference), expected)
    generator = torch.Generator().manual_seed(0)
    assert (kl_k3(torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)) >= 0).all()


def test_kl_estimate_is_unbiased() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * kl_k3(policy.log(), reference.log())).sum(), exact)


def test_loss_by_hand() -> None:
    log_probs = torch.tensor([[0.5, 0.25]]).log().requires_grad_()
    old = torch.tensor([[0.25, 0.25]]).log()
    loss, sums = grpo_token_loss(
        log_probs, old, log_probs.detach(), torch.tensor([1.0]), torch.ones(1, 2), clip=0.2, kl_coefficient=0.5
    )
    # Ratios 2 (clipped to 1.2) and 1, no divergence.
    torch.testing.assert_close(loss.detach(), torch.tensor(-2.2))
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {"loss": -2.2, "kl": 0.0, "clipped": 1.0, "tokens": 2.0}
    )


def test_filling_and_masked_rows_have_no_effect() -> None:
    generator = torch.Generator().manual_seed(1)
    new, old, reference = (torch.randn(3, 4, generator=generator) for _ in range(3))
    advantages = torch.randn(3, generator=generator)
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    loss, _ = grpo_token_loss(new, old, reference, advantages, mask, clip=0.2, kl_coefficient=0.1)
    new[0, 2:], new[2] = 5.0, -5.0
    advantages[2] = 100.0
    again, _ = grpo_token_loss(new, old, reference, advantages, mask, clip=0.2, kl_coefficient=0.1)
    assert loss == again


# -- model --------------------------------------------------------------------------------------------------------


def test_sampling_with_the_cache_follows_the_plain_model() -> None:
    model = Transformer(SMALL, seed=0)
    prompts = torch.tensor([encode("12+34="), encode("98+76=")])
    responses = generate(model, prompts, torch.zeros(2, dtype=torch.int64), length=4, eos_id=EOS_ID, temperature=0)
    tokens = prompts
    for position in range(4):
        best = model(tokens)[0][:, -1].argmax(dim=-1)
        is_open = (responses[:, :position] != EOS_ID).all(dim=1)
        assert responses[is_open, position].tolist() == best[is_open].tolist()
        tokens = torch.cat((tokens, responses[:, position : position + 1]), dim=1)


def test_samples_do_not_depend_on_the_rows_beside() -> None:
    model = Transformer(SMALL, seed=0)
    prompts, seeds = torch.tensor([encode(f"{n}+{n}=") for n in range(10, 42)]), row_seeds(0, 0, 32)
    whole = generate(model, prompts, seeds, length=4, eos_id=EOS_ID)
    halves = [
        generate(model, prompts[part], seeds[part], length=4, eos_id=EOS_ID) for part in (slice(20), slice(20, 32))
    ]
    assert whole.tolist() == torch.cat(halves).tolist()
    assert whole.tolist() != generate(model, prompts, row_seeds(0, 1, 32), length=4, eos_id=EOS_ID).tolist()


def test_samples_follow_the_model_s_probabilities() -> None:
    model = Transformer(SMALL, seed=0)
    with torch.no_grad():
        model.head.weight *= 20  # far from uniform
    prompts = torch.tensor([encode("12+34=")]).expand(4000, -1)
    first = generate(model, prompts, row_seeds(0, 0, 4000), length=1, eos_id=EOS_ID).flatten()
    with torch.no_grad():
        expected = model(prompts[:1])[0][0, -1].softmax(dim=-1)
    share = torch.bincount(first, minlength=VOCAB_SIZE) / 4000
    # Four standard deviations of a share of 0.5 in 4000 draws.
    torch.testing.assert_close(share, expected, atol=4 * 0.5 / 4000**0.5, rtol=0)
    assert expected.max() > 2 / VOCAB_SIZE


def test_nothing_follows_the_end_token() -> None:
    model = Transformer(SMALL, seed=0)
    prompts = torch.tensor([encode("12+34=")] * 200)
    responses = generate(model, prompts, row_seeds(0, 0, 200), length=4, eos_id=EOS_ID)
    filling = responses[response_mask(responses) == 0]
    assert len(filling) > 0 and (filling == EOS_ID).all()


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        generate(
            Transformer(SMALL, 0), torch.zeros(1, 6).long(), row_seeds(0, 0, 1), length=1, eos_id=0, temperature=-1
        )


def test_log_probs_are_those_of_the_next_token() -> None:
    model = Transformer(SMALL, seed=0)
    prompts, responses = torch.tensor([encode("12+34=")]), torch.tensor([[6, 4, EOS_ID, EOS_ID]])
    with torch.no_grad():
        got = response_log_probs(model, prompts, responses)
        for position in range(4):
            logits = model(torch.cat((prompts, responses[:, :position]), dim=1))[0][:, -1]
            expected = logits.log_softmax(dim=-1)[0, responses[0, position]]
            torch.testing.assert_close(got[0, position], expected)


def test_equal_seeds_give_equal_weights() -> None:
    first, second = Transformer(SMALL, 1).state_dict(), Transformer(SMALL, 1).state_dict()
    assert all(first[name].equal(second[name]) for name in first)
    assert not Transformer(SMALL, 2).head.weight.equal(first["head.weight"])


# -- learner ------------------------------------------------------------------------------------------------------


def make_batch(num_rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Return samples as one step would have them, with more tokens in one half than in the other."""
    model = Transformer(SMALL, seed)
    problems = make_problems()[seed : seed + num_rows]
    prompts = torch.tensor([encode(problem.prompt) for problem in problems])
    responses = generate(model, prompts, row_seeds(seed, 0, num_rows), length=RESPONSE_LENGTH, eos_id=EOS_ID)
    responses[: num_rows // 2, 1:] = EOS_ID
    with torch.no_grad():
        log_probs = response_log_probs(model, prompts, responses)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask(responses),
        "old_log_probs": log_probs,
        "reference_log_probs": log_probs - 0.1,
        "advantages": torch.linspace(-1, 1, num_rows),
    }


def take(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: column[rows] for name, column in batch.items()}


class FakeRanks:
    """Stands in for ``torch.distributed`` in threads of one process: adds up what all of them bring."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.brought: dict[int, Tensor] = {}
        self.num_messages = 0

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.world_size

    def all_reduce(self, tensor: Tensor) -> None:
        self.brought[threading.get_ident()] = tensor.clone()
        if self.barrier.wait() == 0:
            self.num_messages += 1
        tensor.copy_(torch.stack(list(self.brought.values())).sum(dim=0))
        self.barrier.wait()

    def run(self, *calls: Any) -> list[Any]:
        results: dict[int, Any] = {}

        def work(index: int) -> None:
            results[index] = calls[index]()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[index] for index in range(len(calls))]


def test_two_ranks_take_the_step_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(8)
    tokens = [float(take(batch, part)["response_mask"].sum()) for part in (slice(4), slice(4, 8))]
    assert tokens[0] != tokens[1]
    config = LearnerConfig(num_passes=2, num_mini_batches=2, kl_coefficient=0.1)
    alone = Learner(SMALL, config, seed=0)
    expected = alone.update(batch)

    ranks = FakeRanks(2)
    monkeypatch.setattr(learner_module, "dist", ranks)
    pair = [Learner(SMALL, config, seed=0) for _ in range(2)]
    dealt = {name: column[deal_rows(8, 2, 2)[0]] for name, column in batch.items()}
    reports = ranks.run(lambda: pair[0].update(take(dealt, slice(4))), lambda: pair[1].update(take(dealt, slice(4, 8))))
    assert reports[0] == pytest.approx(expected, rel=1e-4, abs=1e-6) and reports[0] == reports[1]
    for parameter, first, second in zip(
        alone.model.parameters(), pair[0].model.parameters(), pair[1].model.parameters(), strict=True
    ):
        assert first.equal(second)
        # AdamW divides by the gradient's own size, so rounding shows where gradients are near zero.
        torch.testing.assert_close(first, parameter, atol=2e-5, rtol=1e-4)


def test_mean_gradient_is_the_token_weighted_mean_of_the_parts() -> None:
    batch = make_batch(8)

    def gradient(rows: slice) -> tuple[Tensor, float]:
        model = Transformer(SMALL, 0)
        part = take(batch, rows)
        loss, sums = grpo_token_loss(
            response_log_probs(model, part["prompts"], part["responses"]),
            part["old_log_probs"],
            part["reference_log_probs"],
            part["advantages"],
            part["response_mask"],
            clip=0.2,
            kl_coefficient=0.1,
        )
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        return flat / sums["tokens"], float(sums["tokens"])

    whole, num_tokens = gradient(slice(8))
    (first, first_tokens), (second, second_tokens) = gradient(slice(4)), gradient(slice(4, 8))
    assert first_tokens + second_tokens == num_tokens
    torch.testing.assert_close(
        (first * first_tokens + second * second_tokens) / num_tokens, whole, atol=1e-7, rtol=1e-4
    )


@pytest.mark.parametrize(("bucket_nbytes", "num_messages"), [(1, 3), (40, 2), (10**6, 1)])
def test_buckets_change_the_messages_and_not_the_sums(
    monkeypatch: pytest.MonkeyPatch, bucket_nbytes: int, num_messages: int
) -> None:
    ranks = FakeRanks(2)
    monkeypatch.setattr(learner_module, "dist", ranks)
    mine = [torch.arange(6.0).view(2, 3), torch.tensor(1.0), torch.ones(5)]
    theirs = [torch.ones(2, 3), torch.tensor(2.0), torch.arange(5.0)]
    expected = [one + other for one, other in zip(mine, theirs, strict=True)]
    ranks.run(lambda: all_reduce_sum_(mine, bucket_nbytes), lambda: all_reduce_sum_(theirs, bucket_nbytes))
    assert ranks.num_messages == num_messages
    for one, other, total in zip(mine, theirs, expected, strict=True):
        assert one.equal(total) and other.equal(total)


def test_without_a_process_group_nothing_is_summed() -> None:
    tensor = torch.ones(3)
    all_reduce_sum_([tensor])
    assert tensor.tolist() == [1, 1, 1]


def test_update_raises_what_did_well() -> None:
    batch = make_batch(8)
    learner = Learner(SMALL, LearnerConfig(num_passes=1, kl_coefficient=0.0), seed=0)
    learner.update(batch)
    with torch.no_grad():
        change = response_log_probs(learner.model, batch["prompts"], batch["responses"]) - batch["old_log_probs"]
    gain = (change * batch["response_mask"]).sum(dim=1) * batch["advantages"]
    assert gain.sum() > 0


def test_warm_up_learns_the_answers() -> None:
    learner = Learner(SMALL, LearnerConfig(warmup_learning_rate=1e-2), seed=0)
    problems = make_problems()[:4]
    prompts, answers = torch.tensor([encode(p.prompt) for p in problems]), encode_answers([p.answer for p in problems])
    mask = response_mask(answers)
    losses = [learner.warm_up(prompts, answers, mask)["loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE), rel=0.25)
    assert losses[-1] < losses[0] / 2


def test_uneven_mini_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="8 rows do not part into 3"):
        Learner(SMALL, LearnerConfig(num_mini_batches=3), seed=0).update(make_batch(8))


def test_a_resumed_learner_takes_the_same_steps(tmp_path: Path) -> None:
    batch = make_batch(8)
    learner = Learner(SMALL, LearnerConfig(), seed=0)
    learner.update(batch)
    save_checkpoint(tmp_path / "checkpoint.pt", {"step": 1, "learner": learner.state()})
    going_on = [learner.update(batch) for _ in range(2)]

    resumed = Learner(SMALL, LearnerConfig(), seed=99)
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    assert state["step"] == 1
    resumed.load_state(state["learner"])
    assert [resumed.update(batch) for _ in range(2)] == going_on
    for name, value in learner.model.state_dict().items():
        assert value.equal(resumed.model.state_dict()[name])


def test_a_saved_state_is_a_copy() -> None:
    learner = Learner(SMALL, LearnerConfig(), seed=0)
    learner.update(make_batch(4))
    state = learner.state()
    before = pickle.dumps(state)
    learner.update(make_batch(4))
    assert pickle.dumps(state) == before


# -- files --------------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"step": 1})
    with pytest.raises(TypeError):
        save_checkpoint(path, {"step": threading.Lock()})
    assert load_checkpoint(path) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*gone.pt"):
        load_checkpoint(tmp_path / "gone.pt")


def test_loading_runs_no_code(tmp_path: Path) -> None:
    torch.save({"step": SimpleNamespace()}, tmp_path / "odd.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(tmp_path / "odd.pt")


def test_records_round_trip_and_are_dropped_by_rule(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    for step in range(4):
        append_record(path, {"phase": "train", "step": step})
    keep_records(path, lambda record: record["step"] <= 1)
    assert [record["step"] for record in read_records(path)] == [0, 1]
    with path.open("a") as file:
        file.write(json.dumps({"step": 7})[:-3])  # stopped in the middle of a line
    assert [record["step"] for record in read_records(path)] == [0, 1]


def test_plot_is_a_png(tmp_path: Path) -> None:
    records = [
        {"step": 0, "accuracy": 0.1},
        {"step": 1, "reward": 0.2, "loss": 0.0, "kl": 0.0},
        {"step": 2, "reward": 0.3, "loss": 0.1, "kl": 0.1, "accuracy": 0.2},
    ]
    plot_curves(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


# -- shipping -----------------------------------------------------------------------------------------------------


def test_classes_reach_a_process_without_the_examples(tmp_path: Path) -> None:
    grpo_lib.ship_by_value()
    try:
        (tmp_path / "learner.pkl").write_bytes(cloudpickle.dumps((Learner, SMALL, LearnerConfig(), make_batch(4))))
    finally:
        for module in list(cloudpickle.list_registry_pickle_by_value()):
            cloudpickle.unregister_pickle_by_value(sys.modules[module])
    code = (
        "import importlib.util, pickle, sys\n"
        "assert importlib.util.find_spec('grpo_lib') is None\n"
        "learner_class, model_config, config, batch = pickle.load(open('learner.pkl', 'rb'))\n"
        "learner = learner_class(model_config, config, 0)\n"
        "print(learner.update(batch)['loss'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    expected = Learner(SMALL, LearnerConfig(), 0).update(make_batch(4))["loss"]
    assert float(done.stdout) == pytest.approx(expected, abs=1e-6)
