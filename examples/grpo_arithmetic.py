"""Train a small transformer to add, by GRPO, with one program driving groups of ranks on a Dask cluster.

::

    controller (this program)             hosts (Dask workers)
    -------------------------             ------------------------------------------------------
    Parquet -> Dask DataFrame             reading and tokenising run as ordinary tasks
      -> DataProto (prompts)
    policy.actor.generate          -->    ranks 0..n-1: sample answers               (rows split)
    reward.score                   -->    reward rank: check them     (rows go from rank to rank)
    policy.actor.compute_log_prob  -->    ranks 0..n-1: as sampled            (rows stay put)
    policy.reference.compute_...   -->    ranks 0..n-1: frozen reference      (rows stay put)
    advantages of each group
    policy.actor.update            -->    ranks 0..n-1: gradients summed by torch.distributed (gloo)

Run it on this machine, continue a run, or use a cluster that is there already::

    python examples/grpo_arithmetic.py
    python examples/grpo_arithmetic.py --steps 600 --resume
    python examples/grpo_arithmetic.py --scheduler tcp://10.0.0.5:8786 --ranks 4

The method is GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300) with the clipped ratio of PPO (Schulman et al.
2017, https://arxiv.org/abs/1707.06347); its formulas, and the task, are in ``grpo_lib`` beside this file.
``grpo_single_process.py`` runs the same training without a cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import dask.config
import grpo_lib
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from grpo_lib.algorithm import group_advantages
from grpo_lib.arithmetic import (
    EOS_ID,
    RESPONSE_LENGTH,
    encode,
    encode_answers,
    is_well_formed,
    make_problems,
    response_mask,
    reward_of,
    split_problems,
)
from grpo_lib.learner import Learner, LearnerConfig
from grpo_lib.model import ModelConfig, Transformer, generate, response_log_probs
from grpo_lib.run_files import RunFiles, load_checkpoint, plot_curves, save_checkpoint
from grpo_lib.schedule import deal_rows, draw_problems, row_seeds
from grpo_lib.settings import Settings, add_options, count, differences, positive_int, settings_from

from dask_controller import (
    DaskClassWithInitArgs,
    DaskResourcePool,
    DaskWorkerGroup,
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    Dispatch,
    Worker,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from dask_controller.errors import ControllerError

if TYPE_CHECKING:
    import pandas
    from grpo_lib.display import Display

# ---------------------------------------------------------------------------------------------------------------------
# The roles: what runs on the ranks
# ---------------------------------------------------------------------------------------------------------------------

#: Rows are split over the ranks, and the results of all ranks are joined.
SPLIT_ROWS = make_nd_compute_dataproto_dispatch_fn(mesh_name="rows")
#: Rows are split over the ranks; all ranks end with the same result, so only rank 0 sends it back.
SPLIT_ROWS_ONE_RESULT = make_nd_compute_dataproto_dispatch_fn(mesh_name="gradients")


class Actor(Worker):
    """The policy: samples answers, and is trained on how they did.

    Each rank holds a whole copy of the model and a share of the rows (data parallelism).
    """

    def __init__(self, model_config: ModelConfig, learner_config: LearnerConfig, seed: int) -> None:
        super().__init__()
        # A host of a cluster that is used again may still be in the process group of a run that was killed.
        self.leave()
        # The group has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and starts all ranks at the same time.
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        self._register_dispatch_collect_info("rows", dp_rank=self.rank, is_collect=True)
        self._register_dispatch_collect_info("gradients", dp_rank=self.rank, is_collect=self.rank == 0)
        self.learner = Learner(model_config, learner_config, seed)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate(self, batch: DataProto) -> DataProto:
        """Answer the prompts; the answers stay here until somebody asks for them."""
        responses = generate(
            self.learner.model,
            batch.batch["prompts"],
            batch.batch["row_seeds"],
            length=RESPONSE_LENGTH,
            eos_id=EOS_ID,
            temperature=batch.meta_info["temperature"],
        )
        return DataProto.from_dict(
            tensors={
                "prompts": batch.batch["prompts"],
                "responses": responses,
                "response_mask": response_mask(responses),
            },
            non_tensors={"answer": batch.non_tensor_batch["answer"]},
        )

    @register(dispatch_mode=SPLIT_ROWS, blocking=False)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probabilities under the weights as they are now."""
        return log_prob_column(self.learner.model, batch, "old_log_probs")

    @register(dispatch_mode=SPLIT_ROWS_ONE_RESULT)
    def warm_up(self, batch: DataProto) -> DataProto:
        """One supervised step."""
        report = self.learner.warm_up(batch.batch["prompts"], batch.batch["responses"], batch.batch["response_mask"])
        return DataProto(meta_info={"report": report})

    @register(dispatch_mode=SPLIT_ROWS_ONE_RESULT)
    def update(self, batch: DataProto) -> DataProto:
        """The optimiser steps of one GRPO step."""
        return DataProto(meta_info={"report": self.learner.update(dict(batch.batch.items()))})

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def state(self) -> dict[str, Any]:
        """Weights and optimiser state; the same on all ranks, so rank 0's will do."""
        return self.learner.state()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self.learner.load_state(state)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        """Leave the process group, so that the host can join another."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Reference(Worker):
    """The policy as it was before GRPO, frozen. Lives in the same processes as the actor."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        self._register_dispatch_collect_info("rows", dp_rank=self.rank, is_collect=True)
        self.model = Transformer(model_config, seed=0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, weights: dict[str, Any]) -> None:
        """Become the policy with these weights."""
        self.model.load_state_dict(weights)

    @register(dispatch_mode=SPLIT_ROWS, blocking=False)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probabilities under the frozen weights."""
        return log_prob_column(self.model, batch, "reference_log_probs")


class Reward(Worker):
    """Checks answers. Needs no model, so it has a host of its own and works while the policy's ranks do."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        """Give 1 for the right answer, 0 for any other; and note which answers are numbers at all."""
        responses = batch.batch["responses"].tolist()
        answers = batch.non_tensor_batch["answer"]
        rewards = [reward_of(response, answer) for response, answer in zip(responses, answers, strict=True)]
        well_formed = [float(is_well_formed(response)) for response in responses]
        return DataProto.from_dict(tensors={"rewards": torch.tensor(rewards), "well_formed": torch.tensor(well_formed)})


@torch.no_grad()
def log_prob_column(model: Transformer, batch: DataProto, name: str) -> DataProto:
    """Return one new column; the columns of `batch` need not travel again."""
    return DataProto.from_dict(
        tensors={name: response_log_probs(model, batch.batch["prompts"], batch.batch["responses"])}
    )


# ---------------------------------------------------------------------------------------------------------------------
# The data: Parquet -> Dask DataFrame -> DataProto
# ---------------------------------------------------------------------------------------------------------------------


def write_problems(folder: str, settings: Settings, num_files: int = 4) -> None:
    """Write the problems to Parquet: the columns ``prompt``, ``answer`` and ``split``."""
    import pandas

    train, held_out = split_problems(make_problems(), settings.num_held_out, settings.seed)
    rows = [(p.prompt, p.answer, "train") for p in train] + [(p.prompt, p.answer, "held_out") for p in held_out]
    frame = pandas.DataFrame(rows, columns=["prompt", "answer", "split"])
    if "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    for index in range(num_files):
        start, stop = index * len(frame) // num_files, (index + 1) * len(frame) // num_files
        frame.iloc[start:stop].to_parquet(f"{folder}/part-{index}.parquet", index=False)


def tokenise(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Add the prompts' token ids; runs on the hosts, one task per partition."""
    return frame.assign(prompt_ids=[encode(prompt) for prompt in frame["prompt"]])


def read_problems(folder: str) -> tuple[DataProto, DataProto]:
    """Read and tokenise the problems on the cluster; return those to train on and those held out."""
    import dask.dataframe
    import pandas

    problems = dask.dataframe.read_parquet(folder)
    meta = problems._meta.assign(prompt_ids=pandas.Series(dtype=object))
    frame = problems.map_partitions(tokenise, meta=meta).compute()
    parts = []
    for split in ("train", "held_out"):
        part = frame[frame["split"] == split]
        parts.append(
            DataProto.from_dict(
                tensors={"prompts": torch.tensor(part["prompt_ids"].tolist())},
                non_tensors={"answer": part["answer"].tolist()},
            )
        )
    return parts[0], parts[1]


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm, as the controller sees it
# ---------------------------------------------------------------------------------------------------------------------


class Trainer:
    """Drives the groups through warm-up, GRPO steps and measurements.

    Parameters
    ----------
    policy : DaskWorkerGroup
        Ranks with the roles ``"actor"`` and ``"reference"``.
    reward : DaskWorkerGroup
    train, held_out : DataProto
        Columns ``prompts`` (token ids) and ``answer``.
    settings : Settings
    """

    def __init__(
        self,
        policy: DaskWorkerGroup,
        reward: DaskWorkerGroup,
        train: DataProto,
        held_out: DataProto,
        settings: Settings,
    ) -> None:
        roles = policy.spawn(["actor", "reference"])
        self.actor, self.reference, self.reward = roles["actor"], roles["reference"], reward
        self.num_ranks = policy.world_size
        self.train, self.held_out, self.settings = train, held_out, settings
        self.reference_weights: dict[str, Any] = {}

    def warm_up(self, step: int) -> dict[str, float]:
        """Take one supervised step towards the right answers."""
        settings = self.settings
        drawn = draw_problems(settings.seed, "warmup", step, len(self.train), settings.warmup_rows)
        batch = self.train[drawn]
        answers = encode_answers(list(batch.non_tensor_batch["answer"]))
        labels = DataProto.from_dict(tensors={"responses": answers, "response_mask": response_mask(answers)})
        report: dict[str, float] = self.actor.warm_up(self.evenly(batch.union(labels), 1)).meta_info["report"]
        return report

    def freeze_reference(self, weights: dict[str, Any] | None = None) -> None:
        """Make the reference the policy as it is now, or the one with the given weights."""
        self.reference_weights = self.actor.state()["model"] if weights is None else weights
        self.reference.load_weights(self.reference_weights)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs of the ranks. Their random choices need nothing: see ``grpo_lib.schedule``."""
        return {"learner": self.actor.state(), "reference": self.reference_weights}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self.actor.load_state(state["learner"])
        self.freeze_reference(state["reference"])

    def sample(self, problems: DataProto, seeds: torch.Tensor, temperature: float) -> DataProtoFuture:
        """Have the ranks answer; returns at once. The answers stay with the ranks that made them."""
        prompts = problems.union(DataProto.from_dict(tensors={"row_seeds": seeds}))
        prompts.meta_info["temperature"] = temperature
        samples: DataProtoFuture = self.actor.generate(prompts)
        return samples

    def step(self, step: int) -> dict[str, float]:
        """Take one GRPO step: sample, score, compare inside each group, update."""
        settings = self.settings
        drawn = draw_problems(settings.seed, "train", step, len(self.train), settings.prompts_per_step)
        problems = self.train[drawn].repeat(settings.samples_per_prompt, interleave=True)

        # Four calls, none of which waits. The samples go from the policy's ranks to the reward's by themselves, and the
        # two log-probabilities are worked out where the samples already are.
        samples = self.sample(problems, row_seeds(settings.seed, step, len(problems)), temperature=1.0)
        scores = self.reward.score(samples)
        old = self.actor.compute_log_prob(samples)
        reference = self.reference.compute_log_prob(samples)
        batch = samples.get().union(scores.get()).union(old.get()).union(reference.get())

        rewards = batch.batch["rewards"]
        advantages = group_advantages(rewards, settings.samples_per_prompt)
        batch = batch.union(DataProto.from_dict(tensors={"advantages": advantages}))
        report = self.actor.update(self.evenly(batch, settings.learner.num_mini_batches)).meta_info["report"]
        return {
            "reward": rewards.mean().item(),
            # Groups whose samples all did equally well teach nothing.
            "useful_groups": (advantages.view(-1, settings.samples_per_prompt) != 0).any(dim=1).float().mean().item(),
            **report,
        }

    def measure(self) -> dict[str, float]:
        """Answer the held-out problems with the likeliest tokens, and return the share that is right."""
        samples = self.sample(self.held_out, torch.zeros(len(self.held_out), dtype=torch.int64), temperature=0.0)
        scored = self.reward.score(samples).get()
        return {
            "accuracy": scored.batch["rewards"].mean().item(),
            "well_formed": scored.batch["well_formed"].mean().item(),
        }

    def evenly(self, batch: DataProto, num_mini_batches: int) -> DataProto:
        """Order the rows so that any number of ranks takes the same steps, rounding aside.

        Rows that are repeated to make them divide are masked out: they count for nothing in a mean over tokens.
        """
        order, is_first = deal_rows(len(batch), self.num_ranks, num_mini_batches)
        mask = batch.batch["response_mask"][order] * is_first.unsqueeze(1)
        names = [name for name in batch.batch.keys() if name != "response_mask"]
        return batch.select(names, []).select_idxs(order).union(DataProto.from_dict(tensors={"response_mask": mask}))


# ---------------------------------------------------------------------------------------------------------------------
# The run: cluster, groups, loop, files
# ---------------------------------------------------------------------------------------------------------------------

#: How long a scheduler may take to answer, and its hosts to be there.
CONNECT_TIMEOUT_S = 10
HOSTS_TIMEOUT_S = 30

#: Environment of the hosts. Dask has them give freed memory back at once, so each temporary tensor is paged in anew,
#: which took 45 % more time on a CPU. With these, glibc keeps up to 1 GiB, and takes tensors of up to 32 MiB from it.
MALLOC_KEEPS_MEMORY = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**30,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
}


def fail(message: str, exit_code: int = 2) -> NoReturn:
    """End the program with a message for the person who started it."""
    print(f"grpo_arithmetic: {message}", file=sys.stderr)
    raise SystemExit(exit_code)


def local_cluster(num_hosts: int) -> LocalCluster:
    """Start a cluster on this machine, one thread per host."""
    # Ctrl-C in a terminal reaches every process of the program. It is for the controller, which then ends the others;
    # children inherit that they are to ignore it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with dask.config.set(MALLOC_KEEPS_MEMORY):
            # No memory limit: Dask's would be a share of the machine's memory, and models count towards it.
            return LocalCluster(n_workers=num_hosts, threads_per_worker=1, memory_limit=0, dashboard_address=":0")
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def connected(scheduler: str | None, num_hosts: int) -> Iterator[Client]:
    """Connect to a cluster, started here unless `scheduler` says where one is, and wait for its hosts."""
    with contextlib.ExitStack() as stack:
        if scheduler is None:
            client = stack.enter_context(Client(stack.enter_context(local_cluster(num_hosts))))
        else:
            try:
                client = stack.enter_context(Client(scheduler, timeout=CONNECT_TIMEOUT_S))
            except (OSError, TimeoutError, ValueError) as error:
                fail(
                    f"no Dask scheduler answers at {scheduler!r} ({type(error).__name__}: {error}).\n"
                    "Give the address that `dask scheduler` prints, such as tcp://10.0.0.5:8786; or leave --scheduler "
                    "out to start a cluster on this machine."
                )
        try:
            client.wait_for_workers(num_hosts, timeout=HOSTS_TIMEOUT_S)
        except TimeoutError:
            fail(
                f"needs {num_hosts} Dask workers (one for each rank and one for the reward), but the cluster has "
                f"{len(client.nthreads())} after {HOSTS_TIMEOUT_S} s.\n"
                "Start more, or ask for fewer ranks with --ranks."
            )
        try:
            yield client
        finally:
            if scheduler is None:
                # Python takes a while to end a process that has torch loaded; that the nannies do not wait is no news.
                logging.getLogger("distributed.nanny").setLevel(logging.ERROR)


@contextlib.contextmanager
def groups(settings: Settings, num_ranks: int) -> Iterator[tuple[DaskWorkerGroup, DaskWorkerGroup]]:
    """Start the policy's ranks, two roles in each process, and the reward's rank."""
    roles = create_colocated_worker_cls(
        {
            "actor": DaskClassWithInitArgs(Actor, settings.model, settings.learner, settings.seed),
            "reference": DaskClassWithInitArgs(Reference, settings.model),
        }
    )
    # One entry per rank: on machines of their own where there are several, else side by side. No accelerators.
    policy_pool = DaskResourcePool([1] * num_ranks, use_gpu=False, name_prefix="policy")
    reward_pool = DaskResourcePool([1], use_gpu=False, name_prefix="reward")
    with (
        DaskWorkerGroup(policy_pool, roles, name_prefix="policy") as policy,
        DaskWorkerGroup(reward_pool, DaskClassWithInitArgs(Reward), name_prefix="reward") as reward,
    ):
        yield policy, reward
        policy.actor.leave()


def load_run(files: RunFiles, settings: Settings, num_steps: int) -> dict[str, Any]:
    """Return the checkpoint to continue from; refuse one that does not belong to this run."""
    try:
        saved = load_checkpoint(files.checkpoint)
    except FileNotFoundError as error:
        fail(str(error))
    if lines := differences(settings, saved["settings"]):
        fail(f"cannot continue from {files.checkpoint}: other settings.\n  " + "\n  ".join(lines))
    if saved["step"] >= num_steps:
        fail(f"{files.checkpoint} is at step {saved['step']} already; ask for more with --steps")
    return saved


def train(
    trainer: Trainer, files: RunFiles, display: Display, options: argparse.Namespace, saved: dict[str, Any] | None
) -> None:
    """Go through the steps, from the start or from where the checkpoint `saved` left off."""
    settings = trainer.settings

    def note(phase: str, step: int, numbers: dict[str, float], began: float) -> None:
        numbers["seconds"] = round(time.monotonic() - began, 4)
        files.record(phase, step, numbers)
        display.show(step, numbers)

    def save(step: int) -> None:
        state = {"step": step, "settings": asdict(settings), "num_ranks": trainer.num_ranks, **trainer.state()}
        save_checkpoint(files.checkpoint, state)

    # Only now, with all ranks up: a start that fails costs no earlier run.
    if saved is None:
        files.start_over()
        for step in display.steps("warm-up", 1, settings.warmup_steps):
            began = time.monotonic()
            note("warmup", step, trainer.warm_up(step), began)
        trainer.freeze_reference()
        began = time.monotonic()
        note("train", 0, trainer.measure(), began)
        save(0)
        first = 1
    else:
        files.forget_after(saved["step"])
        trainer.load_state(saved)
        first = saved["step"] + 1
        display.say(f"Continuing after step {saved['step']}")
        if saved["num_ranks"] != trainer.num_ranks:
            display.say(f"It was on {saved['num_ranks']} rank(s) before: numbers agree up to rounding only")

    for step in display.steps("GRPO", first, options.steps):
        began = time.monotonic()
        numbers = trainer.step(step)
        if step % settings.eval_every == 0 or step == options.steps:
            numbers |= trainer.measure()
        note("train", step, numbers, began)
        if step % options.checkpoint_every == 0 or step == options.steps:
            save(step)


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Set everything up, train, and sum up."""
    for name in ("matplotlib", "pandas", "pyarrow", "rich"):
        importlib.import_module(name)  # what is missing is better said now than after the training
    from grpo_lib.display import Display

    files = RunFiles(Path(options.out).resolve())
    saved = load_run(files, settings, options.steps) if options.resume else None
    # Hosts that were just started import torch first, which takes its time where many do so at once.
    patience = dask.config.set({"controller.probe-timeout": "120s", "controller.start-timeout": "300s"})
    # Lets dispatch add rows where a batch does not divide over the ranks, and take them off the result.
    DataProtoConfig.auto_padding = True
    folder = options.data or str(files.folder / "problems")
    started = time.monotonic()
    print(f"Starting {options.ranks} policy rank(s) and 1 reward rank", flush=True)
    with patience, connected(options.scheduler, options.ranks + 1) as client:
        print(f"Dask dashboard: {client.dashboard_link}", flush=True)
        write_problems(folder, settings)
        try:
            train_problems, held_out = read_problems(folder)
        except FileNotFoundError as error:
            fail(f"the Dask workers cannot read {folder!r} ({error}): give a folder or URL that all see with --data")
        with groups(settings, options.ranks) as (policy, reward), Display() as display:
            trainer = Trainer(policy, reward, train_problems, held_out, settings)
            train(trainer, files, display, options, saved)

    records = files.train_records()
    plot_curves(records, files.plot)
    measured = [record for record in records if "accuracy" in record]
    print(
        f"\nHeld-out problems answered right: {measured[0]['accuracy']:.1%} before GRPO, "
        f"{measured[-1]['accuracy']:.1%} after {measured[-1]['step']} steps. "
        f"{time.monotonic() - started:.0f} s in all.\n"
        f"Curves:     {files.plot}\nNumbers:    {files.metrics}\nCheckpoint: {files.checkpoint}"
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="grpo_arithmetic", description="Train a small transformer to add two numbers, by GRPO on a Dask cluster."
    )
    parser.add_argument("--steps", type=count, default=300, metavar="N", help="GRPO steps in all (default: 300)")
    parser.add_argument(
        "--ranks", type=positive_int, default=2, metavar="N", help="ranks that share the policy's work (default: 2)"
    )
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="use this Dask cluster; it needs one worker more than there are ranks"
    )
    parser.add_argument(
        "--out", default="runs/grpo_arithmetic", metavar="DIR", help="where files go (default: runs/grpo_arithmetic)"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="where the Parquet files go; all Dask workers must see it (default: in --out)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument(
        "--checkpoint-every", type=positive_int, default=25, metavar="N", help="steps between checkpoints (default: 25)"
    )
    add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the program."""
    options = parse_options()
    # The hosts need not have these modules: they are sent along with the roles' classes.
    grpo_lib.ship_by_value()
    try:
        run(options, settings_from(options))
    except ModuleNotFoundError as error:
        fail(f"{error}. The demo needs a few more packages: pip install 'dask-controller[demo]'")
    except KeyboardInterrupt:
        has_checkpoint = RunFiles(Path(options.out)).checkpoint.exists()
        hint = f"; `--resume --out {options.out}` continues from the last checkpoint" if has_checkpoint else ""
        fail(f"stopped{hint}", exit_code=130)
    except ControllerError as error:
        fail(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
