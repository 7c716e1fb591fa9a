"""A run: everything the loop and the hooks need, put together from a configuration, saved and restored as a whole."""

import time
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator

from grpozoo import models
from grpozoo.compose.plugins import Active
from grpozoo.compose.settings import Settings
from grpozoo.cycle import Cycle
from grpozoo.errors import UserError
from grpozoo.evaluate import evaluate
from grpozoo.metrics import Sums, aside
from grpozoo.policy import Policy, Snapshot
from grpozoo.rewards.asking import collective
from grpozoo.rng import stream
from grpozoo.run import state
from grpozoo.run.ask import Ask
from grpozoo.run.checkpoint import Store
from grpozoo.run.numbers import Clock, foreseen, observe
from grpozoo.run.passes import Passes
from grpozoo.run.processes import Interruption, Processes
from grpozoo.run.prompts import PromptStream
from grpozoo.run.survey import check_prompts
from grpozoo.run.tracking import Tracker
from grpozoo.sampling import Law
from grpozoo.types import Rewards, Rollouts


class Run:
    """The context that hooks see as `run` (grpozoo.context.Context). Each part answers for itself; here they meet."""

    def __init__(self, settings: Settings, accelerator: Accelerator, run_dir: Path, checkpoint: Path | None):
        self.settings, self.config, self.task, self.run_dir = settings, settings.config, settings.task, run_dir
        self.active: Active = settings.active
        self.plugins, self.hooks, self.needs = self.active.plugins, self.active.hooks, self.active.needs
        self.step, self.updates = 0, 0  # finished steps, optimizer steps
        self.total_updates = self.config.steps * self.config.update.per_batch
        self._cycle: Cycle | None = None
        self.clock = Clock()
        self.timer = self.clock.timer
        self.data = PromptStream(self.task.train, self.config.seed)
        self.store = Store(run_dir / "checkpoints", self.config.checkpoint.keep)
        self.tracker = Tracker(run_dir, self.config, accelerator, accelerator.is_main_process, record=settings.record())
        self._join(Processes(accelerator))
        self.said: set[str] = set()  # what was printed already
        for notice in settings.notices:
            self.say(notice)
        self._load_policy()
        check_prompts(self)
        self.origin = state.origin(self)
        self.hooks.setup(run=self)
        state.plugin_states(self.plugins)  # what cannot be saved is refused before the first step
        if checkpoint:
            state.restore(self, checkpoint)
            self.tracker.progress.print(f"resumed {run_dir} after step {self.step} of {self.config.steps}")
        else:
            self.tracker.truncate({})
        state.write_manifest(self)

    def _join(self, processes: Processes) -> None:
        """What the processes tell each other, and what they are asked."""
        self.processes, self.accelerator = processes, processes.accelerator
        self.rank, self.world = processes.rank, processes.world
        self.gather, self.sum, self.sum_gradients = processes.gather, processes.sum, processes.sum_gradients
        self.interruption = Interruption(processes, self.tracker.progress.print)
        ask = Ask(self)
        self.prompts, self.generate, self.given = ask.prompts, ask.generate, ask.given
        self.score, self.verdicts = ask.score, ask.verdicts

    def _load_policy(self) -> None:
        """The model, what of it trains, its optimizer, and the passes over it."""
        config, optim = self.config, self.config.optim
        law = Law(config.temperature, config.sampling.top_k, config.sampling.top_p, config.sampling.min_p)
        model, tokenizer = models.load(config.model, self.task, self.processes.device, config.seed)
        options = (config.model.chat_template, config.update.logits_chunk, config.model.special_tokens_in_data)
        self.policies = {"policy": Policy(model, tokenizer, law, *options)}
        model.requires_grad_(False)
        groups = [{"lr_scale": 1.0, **group} for group in self.hooks.select_parameters(policy=self.policy)]
        self.trained = [parameter for group in groups for parameter in group["params"]]
        if not self.trained:
            raise UserError("select_parameters() selected nothing: there is nothing to train")
        self.reference = Snapshot(self.policy, self.trained) if "ref_logprobs" in self.needs else None
        if config.update.prefix_cache:
            self.policy.freeze()
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=tuple(optim.betas), eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        tables = bool(self.hooks.minibatch.get_hookimpls())
        self.passes = Passes(self.policy, self.reference, self.processes, config, self.needs, tables)
        self.measure, self.current, self.mine = self.passes.measure, self.passes.current, self.passes.mine

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
        self.passes.remember(None if cycle is None else cycle.rollouts)

    def stream(self, purpose: str, *key):
        """A numpy generator of one's own: named by purpose and key, the same in every process and after a resume."""
        return stream(self.config.seed, purpose, self.step, *key)

    def say(self, text: str) -> None:
        """Print a text above the live line, once in a run, by the main process."""
        if text not in self.said and self.processes.main:
            self.said.add(text)
            self.tracker.progress.print(text)

    def observe(self, rollouts: Rollouts, rewards: Rewards) -> Sums:
        """Metrics of the step's completions."""
        return observe(rollouts, rewards, self.verdicts(rollouts, rewards).tolist(), self.policies)

    @collective
    def evaluate(self) -> dict[str, float]:
        """Held-out metrics; what is logged and timed meanwhile is not the step's."""
        started = time.perf_counter()
        with self.clock.aside(), aside(self.plugins):
            return evaluate(self) | {"time/eval_s": time.perf_counter() - started}

    def record(self, step: int, metrics: dict[str, float], cycle: Cycle | None = None) -> None:
        """Hand a step's metrics and completions to the tracker."""
        if step == 0 and (text := foreseen(metrics, self.config.group_size)):
            self.tracker.progress.print(text)
        self.tracker.log(step, metrics)
        if cycle is not None:
            self.tracker.completions(step, cycle.rollouts, cycle.rewards, cycle.advantages)

    def stopping(self) -> bool:
        """Whether any process was told to stop."""
        return self.interruption.asked()

    def save(self) -> None:
        """A checkpoint of this moment."""
        with self.timer("time/checkpoint_s"):
            state.save(self)

    def finished(self) -> None:
        """Write the final model and the summary; show the table."""
        if self.processes.main:
            models.save(self.policy.plain(), self.policy.tokenizer, self.run_dir / "model")
            state.write_manifest(self, finished=True)
        self.tracker.finish(self.run_dir / "model")
