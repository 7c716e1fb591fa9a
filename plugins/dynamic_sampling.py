"""Dynamic sampling (DAPO, arXiv:2503.14476, sec. 3.2): a full batch of groups that hold right and wrong answers.

    mixed(g) = 0 < sum_{i in g} v_i < n_g           v_i = 1 right, 0 wrong; n_g completions of g have a verdict
               or, for a group that a plugin drew again with another prompt: its rewards differ
    kept = {g of the step : mixed(g) or n_g = 1}    round 1; one completion alone cannot be mixed and is kept
    while |kept| < N and round < max_rounds:        N = prompts_per_step
        kept += the same of the next prompts        prompts_per_round new groups
    train on the first N of kept                    whole groups, in the order in which they came

The test asks for accuracy, not for rewards: a shaped reward (length, format) has a spread where every answer is right,
and would keep groups that teach nothing about being right. So it stacks on any reward, advantage and loss. Whatever
re-rolls completions applies before, whatever adds rows to chosen groups (luffy) applies after. Completions of another
prompt (scope_rl's sub-questions) are trained for more than the answer, so there the rewards are what may differ.
It is not free: `extra` counts the completions that a step costs beyond its own.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from grpozoo import Plugin, Request, UserError, concatenate, group_equal, group_index, hookimpl

OnLimit = Enum("OnLimit", ["train", "error"])


class DynamicSampling(Plugin):
    """`algo=dynamic_sampling`, or as a part of `algo=dapo`."""

    order = 50
    metrics = {
        "kept": "share of the sampled groups, 0 to 1: passed the test",
        "rounds": "count: rounds of sampling, the step's own batch included",
        "extra": "completions: sampled beyond the step's own batch, the price of a full one",
        "missing": "groups: that max_rounds left short of prompts_per_step (0: the batch is full)",
    }

    @dataclass
    class Config:
        max_rounds: int = 10  # rounds of sampling in a step, its own batch included, at least 1
        prompts_per_round: int | None = None  # new prompts in each further round; null: prompts_per_step, published 3 x
        on_limit: OnLimit = OnLimit.train  # train: go on with the groups there are | error (published): stop the run

        def __post_init__(self):
            for name in ("max_rounds", "prompts_per_round"):
                if getattr(self, name) is not None and getattr(self, name) < 1:
                    raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.group_size == 1:
            return f"{self.name} does nothing with group_size=1: a single completion is always kept"

    @hookimpl(wrapper=True)
    def resample(self, rollouts, rewards, run):
        original = rollouts, rewards = yield
        wanted = run.config.prompts_per_step  # N
        parts, kept, mixed, groups, extra = [], 0, 0, 0, 0
        for rounds in range(1, self.config.max_rounds + 1):
            if rounds > 1:
                rollouts, rewards = self.more(run, first_id=int(rollouts.group_id.max()) + 1)
                extra += len(rollouts)
            good, count = self.sift(run.verdicts(rollouts, rewards), rollouts, rewards)
            mixed, groups = mixed + len(good), groups + count
            rows = [row for group in good[: wanted - kept] for row in group]  # what is beyond N is cut off
            kept = min(kept + len(good), wanted)
            if rows:
                parts.append((rollouts.select(rows), rewards.select(rows)))
            if kept == wanted:
                break
        self.log("kept", mixed / groups)
        self.log("rounds", rounds)
        self.log("extra", extra)
        self.log("missing", wanted - kept)
        if kept < wanted:
            self.fell_short(kept, wanted, run)
        return tuple(map(concatenate, zip(*parts, strict=True))) if parts else original

    def more(self, run, first_id):
        """Completions of the next prompts, as groups that the step does not have yet, and their rewards."""
        prompts = run.prompts(self.config.prompts_per_round or run.config.prompts_per_step)
        samples = tuple(range(run.config.group_size))
        rollouts = run.generate([Request(prompt, first_id + i, samples) for i, prompt in enumerate(prompts)])
        return rollouts, run.score(rollouts)

    def sift(self, verdicts, rollouts, rewards):
        """(the rows of each group that passes, in order of appearance; how many groups there are)."""
        index, groups = group_index(rollouts.group_id)
        zeros = verdicts.new_zeros(groups)
        right = zeros.index_add(0, index, verdicts.nan_to_num(0.0))  # [groups]
        known = zeros.index_add(0, index, (~verdicts.isnan()).to(verdicts.dtype))  # n_g
        passes = ((right > 0) & (right < known) | (known == 1))[index]  # [R]
        again = torch.tensor([tag != "train" for tag in rollouts.tag])
        passes = torch.where(again, ~group_equal(rewards.total, rollouts.group_id), passes).tolist()
        members = {}
        for row, group in enumerate(index.tolist()):
            members.setdefault(group, []).append(row)
        return [rows for rows in members.values() if passes[rows[0]]], groups

    def fell_short(self, kept, wanted, run):
        rounds, name = self.config.max_rounds, f"plugins.{self.name}"
        advice = "an easier or harder task, a larger group_size or a higher limit helps"
        if self.config.on_limit is OnLimit.error:
            raise UserError(
                f"{name}: after {rounds} rounds (max_rounds) {kept} of {wanted} groups have right and wrong answers\n{advice}"
            )
        text = f"{name}: {rounds} rounds (max_rounds) do not always fill {wanted} groups; training goes on with fewer"
        run.say(f"{text} (metric {self.name}/missing): {advice}")
