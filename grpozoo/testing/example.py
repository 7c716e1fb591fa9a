"""Batches worked by hand: the family's worked example, a ragged one with every awkward row, and ways to disturb them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpozoo.ops import group_equal, group_mean, group_std
from grpozoo.types import Batch, Output, Prompt, Rewards, Rollouts
from grpozoo.update import minibatch_tables

TOKEN_FIELDS = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")  # of Rollouts, [R, T]


class Fixture(NamedTuple):
    """A step before its first update. `out.logprobs` and `out.entropy` are leaves that collect gradients."""

    rollouts: Rollouts
    rewards: Rewards
    batch: Batch
    out: Output


def fixture(dtype: torch.dtype = torch.float64) -> Fixture:
    """Fixture F1: two groups of four, 27 tokens, T = 5, at ratios away from 1.

    lo[i, t] = -(0.5 + 0.1 i + 0.05 t)      old log-probabilities, nats; i, t from 0
    lr = lo - 0.05 (((i + t) % 3) - 1)      reference         ls = lo + 0.4 (((i + 2t) % 4) - 1.5) / 1.5   sampler
    lp = lo + d                             current           H  = 0.2 + 0.1 ((i + 3t) % 5)                entropy
    batch.advantages: the reward standardised in its group (ddof 1, 1e-4 added to the std).
    """
    lengths = [3, 5, 2, 4, 1, 4, 5, 3]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 1.0, 0.0]
    difference = 0.01 * torch.tensor([
        [5, 25, -10, 0, 0], [-30, 10, 28, -5, 20], [15, 35, 0, 0, 0], [-25, 22, 30, -12, 0],
        [8, 0, 0, 0, 0], [12, -24, 26, 4, 0], [20, 6, -18, 24, 30], [-26, -8, 14, 0, 0],
    ], dtype=torch.float64)  # fmt: skip
    i, t = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)
    old = -(0.5 + 0.1 * i + 0.05 * t)
    tables = {
        "logprobs": old + 0.4 * (((i + 2 * t) % 4) - 1.5) / 1.5,
        "old_logprobs": old,
        "ref_logprobs": old - 0.05 * (((i + t) % 3) - 1),
        "entropy": 0.2 + 0.1 * ((i + 3 * t) % 5),
    }
    return assemble(lengths, [0] * 4 + [1] * 4, rewards, tables, old + difference, dtype)


def example(dtype: torch.dtype = torch.float64, seed: int = 0) -> Fixture:
    """Groups of 1, 2, 3 and 5 rows, interleaved, ids neither sorted nor small; lengths from 0 to 6; one row without reward."""
    group_id = [40, -3, 40, 7, 40, -3, 40, 7, 40, -3, 1000]
    lengths = [3, 6, 1, 0, 4, 5, 2, 6, 1, 3, 2]
    rewards = [1.0, 0.0, 0.25, 1.0, 0.0, 1.0, float("nan"), 0.0, 1.0, 0.5, 1.0]
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(lengths), 6, generator=generator, dtype=torch.float64)

    old = draw(-2.5, -0.1)
    tables = {
        "logprobs": old + draw(-0.1, 0.1),
        "old_logprobs": old,
        "ref_logprobs": old + draw(-0.3, 0.3),
        "entropy": draw(0.05, 1.5),
    }
    return assemble(lengths, group_id, rewards, tables, old + draw(-0.5, 0.5), dtype)


def assemble(
    lengths: Sequence[int],
    group_id: Sequence[int],
    totals: Sequence[float],
    tables: dict[str, Tensor],
    current: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Fixture:
    """Rows of the given lengths, groups and total rewards (NaN: none); tables: TOKEN_FIELDS, `current`: logprobs [R, T]."""
    width = current.shape[1]
    count = torch.tensor(lengths)
    mask = torch.arange(width) < count[:, None]  # [R, T]
    groups = torch.tensor(group_id)
    total = torch.tensor(totals, dtype=torch.float64)
    samples = [list(group_id[:row]).count(group) for row, group in enumerate(group_id)]
    token = torch.arange(len(lengths))[:, None] + 2 * torch.arange(width)
    rollouts = Rollouts(
        prompts=tuple(prompt(group) for group in group_id),
        group_id=groups,
        sample_id=torch.tensor(samples),
        prompt_ids=tuple((2 + group % 5, 3 + group % 7) for group in group_id),
        completion_ids=(2 + token % 9) * mask,
        completion_mask=mask,
        finish_reason=tuple("length" if length == width else "stop" for length in lengths),
        text=tuple(reply(group, row) for row, group in enumerate(group_id)),
        tag=("train",) * len(lengths),
        policy=("policy",) * len(lengths),
        **{name: (values * mask).to(dtype) for name, values in tables.items()},
    )
    rewards = reward_of(total)
    out = Output((current * mask).to(dtype).requires_grad_(), rollouts.entropy.clone().requires_grad_())
    return Fixture(rollouts, rewards, whole_batch(rollouts, rewards, standardised(total, groups)), out)


def prompt(group: int) -> Prompt:
    """Any problem whose answer is a number."""
    return Prompt(f"p{group}", text=f"say {10 + group % 90}", answer=str(10 + group % 90))


def reply(group: int, row: int) -> str:
    """Every second row is right."""
    return (prompt(group).answer or "") if row % 2 == 0 else f"well, {row}"


def reward_of(total: Tensor) -> Rewards:
    """One component of weight 1, and the same numbers as the total [R] float64."""
    return Rewards({"answer": total.clone()}, {"answer": 1.0}, total=total.clone())


def standardised(total: Tensor, group_id: Tensor) -> Tensor:
    """[R]: reward minus mean over std (ddof 1) + 1e-4 of its group; 0 without reward, spread or sibling."""
    scaled = (total - group_mean(total, group_id)) / (group_std(total, group_id) + 1e-4)
    return scaled.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)


def whole_batch(rollouts: Rollouts, rewards: Rewards, advantages: Tensor) -> Batch:
    """All rows as one micro-batch, at the full width. advantages: [R] or [R, T]."""
    mask = rollouts.completion_mask
    wide = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
    return Batch(
        advantages=wide.to(rollouts.logprobs.dtype).masked_fill(~mask, 0.0),
        mask=mask,
        old_logprobs=rollouts.old_logprobs,
        sampler_logprobs=rollouts.logprobs,
        lengths=rollouts.lengths,
        rewards=rewards.total,
        group_id=rollouts.group_id,
        sample_id=rollouts.sample_id,
        rows=torch.arange(len(rollouts)),
        rollouts=rollouts,
        ref_logprobs=rollouts.ref_logprobs,
    )


def with_tables(hooks, batch: Batch, out: Output, run) -> Batch:
    """The batch with what `minibatch` makes of it; it is the whole optimizer step."""
    fixed = Output(out.logprobs.detach(), None if out.entropy is None else out.entropy.detach())
    return replace(batch, tables=minibatch_tables(hooks, batch, fixed, run, len(batch.rows)))


def leaf(values: Tensor | None) -> Tensor | None:
    """A copy that collects its own gradient."""
    return None if values is None else values.detach().clone().requires_grad_()


def select(step: Fixture, rows: Sequence[int]) -> Fixture:
    """The given rows in the given order."""
    rollouts, rewards = step.rollouts.select(rows), step.rewards.select(rows)
    out = Output(
        *(leaf(None if values is None else values[list(rows)]) for values in (step.out.logprobs, step.out.entropy))
    )
    return Fixture(rollouts, rewards, whole_batch(rollouts, rewards, step.batch.advantages[list(rows)]), out)


def regroup(step: Fixture, rows: Sequence[int], group_id: Sequence[int]) -> Fixture:
    """The given rows (repeats allowed) as other groups, samples numbered anew."""
    chosen = select(step, rows)
    ids = torch.tensor(group_id)
    earlier = torch.ones(len(ids), len(ids), dtype=torch.bool).tril(-1)
    samples = ((ids[:, None] == ids) & earlier).sum(1)
    rollouts = replace(chosen.rollouts, group_id=ids, sample_id=samples)
    return chosen._replace(rollouts=rollouts, batch=whole_batch(rollouts, chosen.rewards, chosen.batch.advantages))


def widen(step: Fixture, columns: int) -> Fixture:
    """More padding on the right."""
    return _tokens(step, lambda values: torch.nn.functional.pad(values, (0, columns)))


def garble(step: Fixture, garbage: float) -> Fixture:
    """`garbage` in every log-probability and entropy where the mask is false."""
    mask = step.batch.mask
    return _tokens(step, lambda values: values.masked_fill(~mask, garbage) if values.is_floating_point() else values)


def relabel(step: Fixture) -> Fixture:
    """Other group ids, in reverse order."""
    rollouts = replace(step.rollouts, group_id=5000 - 17 * step.rollouts.group_id)
    return step._replace(rollouts=rollouts, batch=whole_batch(rollouts, step.rewards, step.batch.advantages))


def retotal(step: Fixture, totals: Sequence[float]) -> Fixture:
    """Other rewards."""
    rewards = reward_of(torch.tensor(totals, dtype=torch.float64))
    return step._replace(rewards=rewards, batch=replace(step.batch, rewards=rewards.total))


def _tokens(step: Fixture, change) -> Fixture:
    names = ("completion_ids", "completion_mask", *TOKEN_FIELDS)
    old = {name: getattr(step.rollouts, name) for name in names}
    rollouts = replace(
        step.rollouts, **{name: None if values is None else change(values) for name, values in old.items()}
    )
    advantages = torch.nn.functional.pad(
        step.batch.advantages, (0, rollouts.completion_mask.shape[1] - step.batch.mask.shape[1])
    )
    out = Output(
        *(leaf(None if values is None else change(values.detach())) for values in (step.out.logprobs, step.out.entropy))
    )
    return Fixture(rollouts, step.rewards, whole_batch(rollouts, step.rewards, advantages), out)
