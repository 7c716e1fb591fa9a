"""A run: everything the loop and the hooks need, built from a configuration, saved and restored as a whole."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from grpozoo import models
from grpozoo.compose.plugins import Active
from grpozoo.compose.settings import Settings
from grpozoo.cycle import Cycle
from grpozoo.errors import UserError
from grpozoo.evaluate import evaluate, group_shares, verdicts
from grpozoo.metrics import dead_groups, weighted_means
from grpozoo.ops import group_equal
from grpozoo.packing import cut, pack, share, tokens_per_micro_batch
from grpozoo.policy.policy import Policy
from grpozoo.policy.snapshot import Snapshot
from grpozoo.rewards.asking import collective
from grpozoo.rewards.score import score
from grpozoo.rng import stream
from grpozoo.rollout import in_order
from grpozoo.run import state
from grpozoo.run.checkpoint import Store, claim
from grpozoo.run.prompts import PromptStream
from grpozoo.run.tracking import Tracker, peak_memory_mb
from grpozoo.sampling import Greedy, Law
from grpozoo.types import Prompt, Request, Rewards, Rollouts, concatenate


class Run:
    """The context that hooks see as `run`. Rollouts and rewards are whole in every process; only work is divided."""

    def __init__(self, settings: Settings, accelerator: Accelerator, run_dir: Path, checkpoint: Path | None):
        self.config, self.task = settings.config, settings.task
        self.active: Active = settings.active
        self.plugins, self.hooks, self.needs = self.active.plugins, self.active.hooks, self.active.needs
        self.accelerator, self.run_dir, self.settings = accelerator, run_dir, settings
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.step, self.updates = 0, 0  # finished steps, optimizer steps
        self._cycle: Cycle | None = None
        self.timings: dict[str, float] = {}
        self.began = time.perf_counter()
        self.data = PromptStream(self.task.train, self.config.seed)
        self.total_updates = self.config.steps * self.config.update.per_batch
        self.store = Store(run_dir / "checkpoints", self.config.checkpoint.keep)
        self.tracker = Tracker(run_dir, self.config, accelerator, accelerator.is_main_process)
        self.signals: list[int] = []  # received
        self.said: set[str] = set()  # what was printed already
        self.lock = claim(run_dir) if accelerator.is_main_process else None
        for notice in settings.notices:
            self.say(notice)
        self._load_policy()
        self.hooks.setup(run=self)
        if checkpoint:
            state.restore(self, checkpoint)
            self.tracker.progress.print(f"resumed {run_dir} after step {self.step} of {self.config.steps}")
        else:
            self.tracker.truncate({})
        state.write_manifest(self)

    def _load_policy(self) -> None:
        config = self.config
        law = Law(config.temperature, config.sampling.top_k, config.sampling.top_p, config.sampling.min_p)
        model, tokenizer = models.load(config.model, self.task, self.accelerator.device, config.seed)
        arguments = (tokenizer, law, config.model.chat_template, config.update.logits_chunk)
        self.policies = {"policy": Policy(model, *arguments)}
        model.requires_grad_(False)
        groups = [{"lr_scale": 1.0, **group} for group in self.hooks.select_parameters(policy=self.policy)]
        self.trained = [parameter for group in groups for parameter in group["params"]]
        if not self.trained:
            raise UserError("select_parameters() selected nothing: there is nothing to train")
        self.reference = Snapshot(self.policy, self.trained) if "ref_logprobs" in self.needs else None
        if config.update.prefix_cache:
            self.policy.freeze()
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=tuple(optim.betas), eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        self.token_budget = tokens_per_micro_batch(config.update, model.config)

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.policies["policy"]

    @cached_property
    def frozen(self) -> str | None:
        """Hash of the parameters that do not train, which stay as they are; None if all train."""
        return state.digest(state.parts(self)[1])

    @property
    def cycle(self) -> Cycle | None:
        """The batch that is being trained on; None between two batches."""
        return self._cycle

    @cycle.setter
    def cycle(self, cycle: Cycle | None) -> None:
        """States of frozen blocks live as long as the batch; after a resume they are computed again."""
        self._cycle = cycle
        self.remember(None if cycle is None else cycle.rollouts)

    def remember(self, rollouts: Rollouts | None) -> None:
        """Let the frozen blocks run once for these rows, if more than one pass will read their states."""
        update = self.config.update
        several = update.per_batch > 1 or self._measured() & {"old_logprobs", "ref_logprobs", "entropy"}
        shared = update.shared_prefix and not update.gradient_checkpointing
        if rollouts is None or not several:
            self.policy.remember(None)
        else:
            mine = share(rollouts, list(range(len(rollouts))), self.rank, self.world)
            self.policy.remember(rollouts, 2 * self.token_budget, shared, mine)

    def _measured(self) -> set[str]:
        """What must be known of the policy before the first update."""
        several = self.config.update.per_batch > 1 or self.hooks.minibatch.get_hookimpls()
        return self.needs | {"old_logprobs"} if several else set(self.needs)

    def stream(self, purpose: str, *key):
        """A numpy generator of one's own: named by purpose and key, the same in every process and after a resume."""
        return stream(self.config.seed, purpose, self.step, *key)

    # --- what hooks and the loop ask for -------------------------------------------------------------------------

    @collective
    def prompts(self, count: int) -> list[Prompt]:
        """The next prompts of the training data, as the plugins prepare them."""
        return self.hooks.prepare_prompts(prompts=self.data.take(count), run=self)

    @collective
    def generate(self, requests: list[Request], temperature: float | None = None) -> Rollouts:
        """Completions for the requests, in their order; the work is divided over the processes.

        temperature: null = the run's; 0 = greedy. Truncation (top-k, top-p, min-p) applies to training only.
        """
        with self.timer("time/generate_s"):
            return self._generate(requests, temperature)

    def _generate(self, requests: list[Request], temperature: float | None) -> Rollouts:
        law = self.policy.law if temperature is None else Law(temperature)
        sampler = Greedy() if law.temperature == 0 else self.hooks.token_sampler(run=self)
        mine = requests[self.rank :: self.world]
        names = sorted({request.policy for request in requests}) or ["policy"]
        parts = []
        for name in names:  # in every process, also for no requests: servers and sharded models need all of them
            if name not in self.policies:
                raise UserError(f"a request names the policy {name!r}, this run has {', '.join(self.policies)}")
            asked = [request for request in mine if request.policy == name]
            parts.append(
                self.hooks.generate(requests=asked, sampler=sampler, law=law, policy=self.policies[name], run=self)
            )
        return in_order(concatenate(self.gather(parts)), requests)

    def given(self, requests: list[Request], texts: list[str]) -> Rollouts:
        """Completions that nobody sampled (traces of another policy): one text for each request, its stop token added.

        Cut at max_completion_length. The requests name their source in `policy`; log-probabilities are 0.
        """
        stop = min(self.policy.stop_ids)
        rows = []
        for request, text in zip(requests, texts, strict=True):
            if len(request.sample_ids) != 1 or request.policy in self.policies:
                raise UserError("given() takes requests of one sample each whose policy is none of the run's")
            rows.append([*self.policy.encode_completion(text), stop])
        lengths = torch.tensor([min(len(row), self.config.max_completion_length) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            ids[row, : lengths[row]] = torch.tensor(tokens[: lengths[row]])
        return Rollouts(
            prompts=tuple(request.prompt for request in requests),
            group_id=torch.tensor([request.group_id for request in requests]),
            sample_id=torch.tensor([request.sample_ids[0] for request in requests]),
            prompt_ids=tuple(self.policy.encode(request.prompt) for request in requests),
            completion_ids=ids,
            completion_mask=mask,
            logprobs=torch.zeros(mask.shape),
            finish_reason=tuple("stop" if len(row) <= n else "length" for row, n in zip(rows, lengths, strict=True)),
            text=tuple(texts),
            tag=tuple(request.tag for request in requests),
            policy=tuple(request.policy for request in requests),
        )

    def verdicts(self, rollouts: Rollouts, rewards: Rewards) -> torch.Tensor:
        """[R] float64, 1 right, 0 wrong, NaN unknown: what evaluation calls right, whatever shapes the rewards."""
        return torch.tensor(verdicts(self, rollouts, rewards), dtype=torch.float64)

    @collective
    def score(self, rollouts: Rollouts) -> Rewards:
        """Rewards of the rollouts, shaped. The main process asks the reward plugins; an error reaches every process."""
        with self.timer("time/reward_s"):
            return self._score(rollouts)

    def _score(self, rollouts: Rollouts) -> Rewards:
        answer: list = [None, None]
        cause: UserError | None = None  # with the traceback, which the other processes cannot have
        if self.accelerator.is_main_process:
            try:
                answer[0] = score(self.hooks, self.plugins, rollouts, self, timeout=self.config.reward_timeout)
            except UserError as error:
                answer[1], cause = str(error), error
        if self.world > 1:
            broadcast_object_list(answer)
        if answer[1] is not None:
            raise cause or UserError(answer[1])
        return self.hooks.transform_rewards(rollouts=rollouts, rewards=answer[0], run=self)

    @collective
    def measure(self, rollouts: Rollouts) -> Rollouts:
        """Add old_logprobs, entropy and ref_logprobs where a plugin or several updates per batch need them."""
        wanted = self._measured()
        self.remember(rollouts)
        if wanted & {"old_logprobs", "entropy"}:
            old, entropy = self._output(self.policy, rollouts, "entropy" in wanted)
            rollouts = replace(rollouts, old_logprobs=old, entropy=entropy)
        if "ref_logprobs" in wanted:
            rollouts = replace(rollouts, ref_logprobs=self._output(self.reference, rollouts, False)[0])
        return rollouts

    @collective
    def current(self, rollouts: Rollouts, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and (if needed) entropies [R, T] of the policy as it is now; only the given rows are filled."""
        return self._output(self.policy, rollouts, "entropy" in self.needs, rows)

    @torch.no_grad()
    def _output(self, policy: Policy | Snapshot, rollouts: Rollouts, entropy: bool, wanted: list[int] | None = None):
        shared = self.config.update.shared_prefix
        logprobs = torch.zeros(rollouts.completion_mask.shape)
        entropies = torch.zeros_like(logprobs) if entropy else None
        rows = list(range(len(rollouts))) if wanted is None else wanted
        for micro in pack(rollouts, self.share(rollouts, rows), 2 * self.token_budget, shared):
            part = cut(rollouts.select(micro))
            width = part.completion_mask.shape[1]
            out = policy.output(part, entropy, shared)
            logprobs[micro, :width] = out.logprobs.cpu()
            if entropy:
                entropies[micro, :width] = out.entropy.cpu()
        return self.sum(logprobs), None if entropies is None else self.sum(entropies)

    def say(self, text: str) -> None:
        """Print a text above the live line, once in a run, by the main process."""
        if text not in self.said and self.accelerator.is_main_process:
            self.said.add(text)
            self.tracker.progress.print(text)

    # --- processes -----------------------------------------------------------------------------------------------

    @collective
    def gather(self, parts: list) -> list:
        """Concatenate lists over the processes, in the order of their ranks."""
        return gather_object(parts) if self.world > 1 else parts

    @collective
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add a CPU tensor up over the processes."""
        if self.world == 1:
            return values
        return self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum").cpu()

    def share(self, rollouts: Rollouts, rows: list[int]) -> list[int]:
        """The rows that this process computes: those of a prompt together, and where states of frozen blocks are kept,
        always the same ones of a batch, because every other process would have to compute their states again."""
        if self.world == 1 or self.policy.prefix is None:
            return share(rollouts, rows, self.rank, self.world)
        wanted = set(rows)
        kept = share(rollouts, list(range(len(rollouts))), self.rank, self.world)
        return [row for row in kept if row in wanted]

    def mine(self, rollouts: Rollouts, rows: list[int]) -> Iterator[tuple[list[int], Rollouts]]:
        """This process's part of the rows in micro-batches under the token budget: (rows, Rollouts cut to their longest).

        For models that a plugin trains itself; add their gradients up with `sum_gradients`.
        """
        live = [row for row in rows if bool(rollouts.completion_mask[row].any())]
        for micro in pack(rollouts, self.share(rollouts, live), self.token_budget, self.config.update.shared_prefix):
            yield micro, cut(rollouts.select(micro))

    @collective
    def sum_gradients(self, parameters: list[torch.Tensor]) -> None:
        """Add up the gradients of all processes; their losses already share one denominator."""
        if self.world == 1:
            return
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        total = self.accelerator.reduce(flat, reduction="sum")
        start = 0
        for parameter in parameters:
            parameter.grad.copy_(total[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def stopping(self) -> bool:
        """Whether any process was told to stop."""
        if self.world == 1:
            return bool(self.signals)
        return bool(self.sum(torch.tensor(float(bool(self.signals)))))

    @contextmanager
    def interruptible(self):
        """SIGINT and SIGTERM ask for a stop after the current optimizer step; a second one stops at once."""

        def ask(number, frame):
            if self.signals:
                raise KeyboardInterrupt
            self.signals.append(number)
            self.tracker.progress.print("stopping after this optimizer step; once more to stop at once")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- numbers -------------------------------------------------------------------------------------------------

    @contextmanager
    def timer(self, name: str):
        """Add the block's seconds to the step's metric `name`."""
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    def observe(self, rollouts: Rollouts, rewards: Rewards) -> dict[str, list[float]]:
        """Metrics of the step's completions, as [sum, weight]."""
        cycle = Cycle(rollouts, rewards, rollouts.logprobs, [])
        lengths, total = rollouts.lengths.double(), rewards.total
        cycle.add("rollout/rows", len(rollouts))
        cycle.add("rollout/length_mean", float(lengths.mean()))
        cycle.add("rollout/length_max", float(lengths.max()))
        cycle.add("rollout/tokens", float(lengths.sum()))
        cycle.add("rollout/truncated", sum(reason == "length" for reason in rollouts.finish_reason) / len(rollouts))
        own = torch.tensor([name in self.policies for name in rollouts.policy])
        cycle.add("rollout/entropy", -float(rollouts.logprobs[own].sum()) / max(float(lengths[own].sum()), 1))
        for name, values in {**rewards.components, "total": total}.items():
            answered = values[~values.isnan()]
            cycle.add(f"reward/{name}_mean", float(answered.mean()), len(answered))
            if name != "total":
                cycle.add(f"reward/{name}_missing", 1 - len(answered) / len(values))
        cycle.add("reward/missing", float(total.isnan().double().mean()))
        cycle.add("reward/total_std", float(total[~total.isnan()].std(correction=0)), float((~total.isnan()).sum()))
        for name, value in group_shares(verdicts(self, rollouts, rewards), rollouts.group_id).items():
            cycle.add(name, value)
        cycle.add("groups/equal", float(group_equal(total, rollouts.group_id).double().mean()))
        return cycle.metrics

    def step_metrics(self, cycle: Cycle) -> dict[str, float]:
        """Everything the core knows about the step that has just ended."""
        metrics = cycle.means() | self.timings
        metrics["time/step_s"] = time.perf_counter() - self.began
        seconds = self.timings.get("time/generate_s", 0.0)  # 0: the cycle came out of a checkpoint
        metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / seconds if seconds else float("nan")
        metrics["memory/peak_mb"] = peak_memory_mb() or float("nan")
        self.timings = {}
        return metrics

    def plugin_metrics(self) -> dict[str, float]:
        """Weighted means of what plugins logged outside the update."""
        parts = [part for plugin in self.plugins.values() for part in plugin.logged]
        for plugin in self.plugins.values():
            plugin.logged.clear()
        return weighted_means(parts)

    @collective
    def evaluate(self) -> dict[str, float]:
        """Held-out metrics. What plugins log meanwhile does not mix with what they logged of training."""
        kept = {plugin: plugin.logged for plugin in self.plugins.values()}
        timings, started = dict(self.timings), time.perf_counter()
        try:
            for plugin in kept:
                plugin.logged = []
            return evaluate(self) | {"time/eval_s": time.perf_counter() - started}
        finally:
            self.timings = timings
            for plugin, logged in kept.items():
                plugin.logged = logged

    def record(self, step: int, metrics: dict[str, float], cycle: Cycle | None = None) -> None:
        """Hand a step's metrics and completions to the tracker."""
        if step == 0:
            self._foresee(metrics)
        self.tracker.log(step, metrics)
        if cycle is not None:
            self.tracker.completions(step, cycle.rollouts, cycle.rewards, cycle.advantages)

    def _foresee(self, metrics: dict[str, float]) -> None:
        """Say at the start how many groups will teach nothing, if they are many."""
        accuracy = next((value for name, value in metrics.items() if name.startswith("heldout/avg@")), float("nan"))
        dead = dead_groups(accuracy, self.config.group_size)
        if dead > 0.5:
            self.tracker.progress.print(
                f"at a sampled accuracy of {accuracy:.1%}, of independent samples, at least {dead:.0%} of the groups of "
                f"{self.config.group_size} will be all right or all wrong and teach nothing: a larger group_size or an easier (harder) task helps"
            )

    # --- the end of a step and of a run ----------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of this moment."""
        with self.timer("time/checkpoint_s"):
            state.save(self)

    def finished(self) -> None:
        """Write the final model and the summary; show the table."""
        if self.accelerator.is_main_process:
            models.save(self.policy.plain(), self.policy.tokenizer, self.run_dir / "model")
            state.write_manifest(self, finished=True)
        self.tracker.finish(self.run_dir / "model")
