"""LUFFY: off-policy guidance, given solutions inside the group (arXiv:2504.14945, sec. 3).

    group = group_size own completions + up to `traces` given ones
    A_i   = r_i - mean(r_group)                             over both kinds, not divided by a standard deviation
    own   : loss = -min(w A, clip(w, 1 - clip, 1 + clip_high) A)         w = exp(logp - logp_old)
    given : loss = -f(p) A,  p = exp(logp),  f(x) = x / (x + gamma)      no clip
            gradient in logp: -f'(p) p A = -gamma p / (p + gamma)^2 A    largest at p = gamma, 0 at p = 0 and 1

The policy that wrote a trace is unknown and taken as 1, so that p itself stands for the ratio; f lifts the gradient of
the unlikely tokens, which are those there is something to learn from. Losses are divided by a constant length
(const_len, as in the paper's runs) or by the number of tokens (token_mean, as in its equations).

It owns the advantage, the surrogate and the aggregation. It stacks on what shapes rewards (a trace is scored by itself:
its siblings are shaped without it), on regularizers and token weights, and applies after dynamic sampling, which judges
what the policy itself can do; with order=[luffy,dynamic_sampling] a trace saves a group that is all wrong, but the
groups that are sampled anew get none.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from grpozoo import (
    Plugin,
    Request,
    UserError,
    clip_surrogate,
    concatenate,
    group_equal,
    group_mean,
    hookimpl,
    importance_ratio,
    masked_mean,
)

TRACE = "trace"  # Rollouts.policy of a given completion
Aggregation = Enum("Aggregation", ["const_len", "token_mean"])


class Luffy(Plugin):
    """`algo=luffy`."""

    order = 60
    metrics = {
        "traces": "share of groups, 0 to 1: have a given completion",
        "trace_reward": "reward: mean total of the given completions",
        "trace_probability": "probability, 0 to 1: mean over the tokens of the given completions",
    }

    @dataclass
    class Config:
        traces: int = 1  # N_off, given completions in a group at most, at least 1
        column: str | None = None  # key of Prompt.extra: a text or a list of texts; null: the task's worked solution
        gamma: float = 0.1  # of f, above 0; the smaller, the more the unlikely tokens count
        clip: float = 0.2  # own completions: lower end of the ratio range is 1 - clip
        clip_high: float | None = None  # upper end is 1 + clip_high; null: clip
        aggregation: Aggregation = Aggregation.const_len  # const_len | token_mean

        def __post_init__(self):
            if self.traces < 1:
                raise ValueError(f"traces is at least 1, got {self.traces}")
            if not self.gamma > 0:
                raise ValueError(f"gamma is above 0, got {self.gamma}")
            for name in ("clip", "clip_high"):
                if (getattr(self, name) or 0) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if self.config.traces > 1 and self.config.column is None:
            raise UserError(
                f"plugins.{self.name}.traces={self.config.traces}, but a task has one worked solution for each prompt\n"
                f"set plugins.{self.name}.column to a key of the prompts' extra that holds a list of texts, or traces=1"
            )

    @hookimpl(wrapper=True)
    def resample(self, rollouts, rewards, run):
        rollouts, rewards = yield
        first, last = {}, {}  # group -> its first row, its highest sample id
        for row, (group, sample) in enumerate(
            zip(rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True)
        ):
            first.setdefault(group, row)
            last[group] = max(last.get(group, sample), sample)
        requests, texts = [], []
        for group, row in first.items():
            for number, text in enumerate(self.texts(rollouts.prompts[row], run.task), start=1):
                sample_ids = (last[group] + number,)
                requests.append(Request(rollouts.prompts[row], group, sample_ids, rollouts.tag[row], TRACE))
                texts.append(text)
        if not texts:
            raise UserError(self.advice(run.step))
        given = run.given(requests, texts)
        scored = run.score(given)
        known = scored.total[~scored.total.isnan()]
        self.log("traces", len({request.group_id for request in requests}) / len(first))
        self.log("trace_reward", known.mean() if len(known) else float("nan"), len(known))
        return concatenate([rollouts, given]), concatenate([rewards, scored])

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        A = total - group_mean(total, group_id)
        return A.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)  # [R]

    @hookimpl
    def policy_loss(self, batch, out):
        A, low = batch.advantages, self.config.clip
        high = low if self.config.clip_high is None else self.config.clip_high
        own = clip_surrogate(importance_ratio(out.logprobs, batch.old_logprobs), A, low, high)  # [r, T]
        given = torch.tensor([name == TRACE for name in batch.rollouts.policy], device=A.device)[:, None]  # [r, 1]
        tokens = batch.mask & given
        p = out.logprobs.masked_fill(~tokens, 0.0).exp()
        self.log("trace_probability", masked_mean(p.detach(), tokens), int(tokens.sum()))
        return torch.where(given, -p / (p + self.config.gamma) * A, own)

    @hookimpl
    def aggregation(self):
        return self.config.aggregation.name

    def texts(self, prompt, task):
        """The given completions of a prompt, none or up to `traces`."""
        found = task.solution(prompt) if self.config.column is None else prompt.extra.get(self.config.column)
        found = [found] if isinstance(found, str) else list(found or ())
        return found[: self.config.traces]

    def advice(self, step):
        column, name = self.config.column, f"plugins.{self.name}"
        if column is None:
            return (
                f"{name}: the task has no worked solution for any prompt of step {step + 1}\n"
                f"set {name}.column to the key of the prompts' extra that holds them, or drop the method with ~{name}"
            )
        return (
            f"{name}.column={column}: no prompt of step {step + 1} has a text under that key of its extra\n"
            "name a key that the data have, or null for the task's own worked solutions"
        )
