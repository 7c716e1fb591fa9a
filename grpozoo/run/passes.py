"""Passes of the policies over rollouts: log-probabilities before, during and after the updates, divided over processes."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from grpozoo.config import Config
from grpozoo.packing import portions, share, tokens_per_micro_batch
from grpozoo.policy import Policy, Snapshot
from grpozoo.rewards.asking import collective
from grpozoo.run.processes import Processes
from grpozoo.types import Rollouts


class Passes:
    """What the policy and its reference say of rollouts, under one token budget."""

    def __init__(
        self,
        policy: Policy,
        reference: Snapshot | None,
        processes: Processes,
        config: Config,
        needs: frozenset[str],
        tables: bool,
    ):
        """needs: of all plugins; tables: whether a plugin looks at whole mini-batches, which needs the old policy."""
        self.policy, self.reference, self.processes, self.needs = policy, reference, processes, needs
        self.token_budget = tokens_per_micro_batch(config.update, policy.model.config)
        self.shared = config.update.shared_prefix and not config.update.gradient_checkpointing
        several = config.update.per_batch > 1
        self.before = needs | {"old_logprobs"} if several or tables else needs  # to be known before the first update
        self.repeated = several or bool(self.before & {"old_logprobs", "ref_logprobs", "entropy"})

    def remember(self, rollouts: Rollouts | None) -> None:
        """Let the frozen blocks run once for these rows, if more than one pass will read their states."""
        if rollouts is None or not self.repeated:
            self.policy.remember(None)
        else:
            mine = share(rollouts, list(range(len(rollouts))), self.processes.rank, self.processes.world)
            self.policy.remember(rollouts, 2 * self.token_budget, self.shared, mine)

    @collective
    def measure(self, rollouts: Rollouts) -> Rollouts:
        """Add old_logprobs, entropy and ref_logprobs where a plugin or several updates per batch need them."""
        self.remember(rollouts)
        if self.before & {"old_logprobs", "entropy"}:
            old, entropy = self._output(self.policy, rollouts, "entropy" in self.before)
            rollouts = replace(rollouts, old_logprobs=old, entropy=entropy)
        if "ref_logprobs" in self.before:
            rollouts = replace(rollouts, ref_logprobs=self._output(self.reference, rollouts, False)[0])
        return rollouts

    @collective
    def current(self, rollouts: Rollouts, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and (if needed) entropies [R, T] of the policy as it is now; only the given rows are filled."""
        return self._output(self.policy, rollouts, "entropy" in self.needs, rows)

    def mine(self, rollouts: Rollouts, rows: list[int]) -> Iterator[tuple[list[int], Rollouts]]:
        """This process's part of the rows in micro-batches under the token budget: (rows, Rollouts cut to their longest).

        For models that a plugin trains itself; add their gradients up with `sum_gradients`.
        """
        live = [row for row in rows if bool(rollouts.completion_mask[row].any())]
        return portions(rollouts, self._share(rollouts, live), self.token_budget, self.shared)

    @torch.no_grad()
    def _output(self, policy: Policy | Snapshot, rollouts: Rollouts, entropy: bool, wanted: list[int] | None = None):
        logprobs = torch.zeros(rollouts.completion_mask.shape)
        entropies = torch.zeros_like(logprobs) if entropy else None
        rows = list(range(len(rollouts))) if wanted is None else wanted
        for micro, part in portions(rollouts, self._share(rollouts, rows), 2 * self.token_budget, self.shared):
            width = part.completion_mask.shape[1]
            out = policy.output(part, entropy, self.shared)
            logprobs[micro, :width] = out.logprobs.cpu()
            if entropy:
                entropies[micro, :width] = out.entropy.cpu()
        return self.processes.sum(logprobs), None if entropies is None else self.processes.sum(entropies)

    def _share(self, rollouts: Rollouts, rows: list[int]) -> list[int]:
        """The rows that this process computes: those of a prompt together, and where states of frozen blocks are kept,
        always the same ones of a batch, because every other process would have to compute their states again."""
        rank, world = self.processes.rank, self.processes.world
        if world == 1 or self.policy.prefix is None:
            return share(rollouts, rows, rank, world)
        wanted = set(rows)
        return [row for row in share(rollouts, list(range(len(rollouts))), rank, world) if row in wanted]
