"""From rollouts with advantages to optimizer steps: mini-batches, micro-batches, one denominator, one gradient.

    loss = aggregate(policy_loss * token_weights) + aggregate(regularizer)        over all rows of the optimizer step

The denominator is counted over every row of the step and every process before the first micro-batch, so how rows are
split, sorted, packed or sharded changes nothing beyond rounding. Rows whose advantage is zero add exactly nothing to
the gradient and are left out where no plugin needs them; they still count in the denominator.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from grpozoo.config import Optim, Schedule
from grpozoo.cycle import Cycle
from grpozoo.cycle import minibatches as minibatches  # these three: their place of earlier
from grpozoo.errors import UserError
from grpozoo.metrics import absorb, add, taken
from grpozoo.ops import aggregate, denominators
from grpozoo.packing import cut
from grpozoo.packing import pack as pack
from grpozoo.packing import share as share
from grpozoo.types import Batch, Output, Rollouts


def batch_of(cycle: Cycle, rows: list[int], device: torch.device, part: Rollouts | None = None) -> Batch:
    """The rows of a micro-batch, cut to their longest completion, on the device. old_logprobs may still be missing.

    part: the rows' rollouts, where they are at hand.
    """
    rollouts = cut(cycle.rollouts.select(rows) if part is None else part, device)
    width = rollouts.completion_mask.shape[1]
    return Batch(
        advantages=cycle.advantages[rows, :width].to(device),
        mask=rollouts.completion_mask,
        old_logprobs=rollouts.old_logprobs,
        sampler_logprobs=rollouts.logprobs,
        lengths=rollouts.lengths,
        rewards=cycle.rewards.total[rows].to(device),
        group_id=rollouts.group_id.to(device),
        sample_id=rollouts.sample_id.to(device),
        rows=torch.tensor(rows, device=device),
        rollouts=rollouts,
        ref_logprobs=rollouts.ref_logprobs,
        tables={name: table[rows, :width].to(device) for name, table in cycle.tables.items()},
    )


def minibatch_tables(hooks, batch: Batch, out: Output, run, size: int) -> dict[str, Tensor]:
    """What plugins make of all rows of an optimizer step, as tables [size, T] over the rows of the whole cycle."""
    tables: dict[str, Tensor] = {}
    for answer in hooks.minibatch(batch=batch, out=out, run=run):
        for name, values in answer.items():
            if name in tables:
                plugins = ", ".join(sorted(impl.plugin_name for impl in hooks.minibatch.get_hookimpls()))
                raise UserError(
                    f"minibatch(): the table {name!r} is given twice; plugins that answer this hook: {plugins}\n"
                    "put the plugin's name in front of its tables: NAME/table"
                )
            table = values.new_zeros(size, batch.mask.shape[1])
            table[batch.rows] = values
            tables[name] = table
    return tables


def objective(hooks, batch: Batch, out: Output, how: str, denominator: Mapping[str, float], all_rows: bool) -> Tensor:
    """The micro-batch's share of the loss, a scalar with gradient. denominator: of each aggregation (ops.denominators)."""
    losses = hooks.policy_loss(batch=batch, out=out)
    for weight in hooks.token_weights(batch=batch, out=out):
        losses = losses * weight
    loss = aggregate(losses, batch.mask, how, denominator[how])
    for answer in hooks.regularizer(batch=batch, out=out):
        if not all_rows:
            names = ", ".join(impl.plugin_name for impl in hooks.regularizer.get_hookimpls())
            raise UserError(
                f'a regularizer acts on rows of zero advantage too: its plugin ({names}) must need "all_rows"'
            )
        term, rule = answer if isinstance(answer, tuple) else (answer, how)
        loss = loss + aggregate(term, batch.mask, rule, denominator[rule])
    return loss


def learning_rate(update: int, total: int, base: float, optim: Optim) -> float:
    """The rate of optimizer step `update` (from 0) of `total`: linear warm-up, then the schedule down to zero."""
    if update < optim.warmup_steps:
        return base * (update + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return base
    progress = (update - optim.warmup_steps) / max(total - optim.warmup_steps, 1)
    return base * ((1 - progress) if optim.schedule is Schedule.linear else 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_step(run, cycle: Cycle) -> None:
    """The next optimizer step of a cycle."""
    rows = cycle.minibatches[cycle.done]
    cycle.done += 1
    mask = cycle.rollouts.completion_mask[rows]
    how = run.hooks.aggregation()
    if not bool(mask.any()):
        add(cycle.metrics, "update/skipped_steps", 1.0)
        return
    add(cycle.metrics, "update/skipped_steps", 0.0)
    denominator = denominators(mask, run.config.max_completion_length)
    cycle.tables = _tables(run, cycle, rows)
    absorb(cycle.metrics, run.plugins)
    live = _live(cycle, rows, "all_rows" in run.needs)
    add(cycle.metrics, "update/skipped_rows", 1 - len(live) / len(rows))
    for parameter in run.trained:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    _backward(run, cycle, live, how, denominator)
    run.sum_gradients(run.trained)
    norm = _clip(run.trained, run.config.optim.max_grad_norm)
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient of step {run.step} is not finite (norm {norm}): the loss overflowed\n"
            "lower lr, check the rewards and the last plugin added; the weights are still those of the last checkpoint"
        )
    rate = learning_rate(run.updates, run.total_updates, run.config.lr, run.config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    run.optimizer.step()
    run.updates += 1
    add(cycle.metrics, "update/grad_norm", norm)
    add(cycle.metrics, "update/lr", rate)


def _tables(run, cycle: Cycle, rows: list[int]) -> dict[str, Tensor]:
    """The tables of an optimizer step. Before the first one the policy is the old one, whose numbers are there."""
    if not run.hooks.minibatch.get_hookimpls():
        return {}
    if cycle.done == 1:
        logprobs, entropy = cycle.rollouts.old_logprobs, cycle.rollouts.entropy
    else:
        logprobs, entropy = run.current(cycle.rollouts, rows)
    cycle.tables = {}
    batch = batch_of(cycle, rows, torch.device("cpu"))
    width = batch.mask.shape[1]
    out = Output(logprobs[rows, :width], None if entropy is None else entropy[rows, :width])
    return minibatch_tables(run.hooks, batch, out, run, len(cycle.rollouts))


def _live(cycle: Cycle, rows: list[int], all_rows: bool) -> list[int]:
    """Rows that can change the gradient."""
    useful = cycle.rollouts.completion_mask.any(1)
    if not all_rows:
        useful = useful & (cycle.advantages != 0).any(1)
    useful = useful.tolist()
    return [row for row in rows if useful[row]]


def _backward(run, cycle: Cycle, live: list[int], how: str, denominator: Mapping[str, float]) -> None:
    """Gradients of this process's share of the rows; what was measured on the way, of all processes."""
    checkpointing = run.config.update.gradient_checkpointing
    shared = run.config.update.shared_prefix and not checkpointing
    parts = []  # of each micro-batch: loss, largest gap, what plugins logged
    with run.policy.training(checkpointing):
        for micro, part in run.mine(cycle.rollouts, live):
            batch = batch_of(cycle, micro, run.policy.device, part)
            out = run.policy.output(batch.rollouts, "entropy" in run.needs, shared)
            if batch.old_logprobs is None:  # the only update of this batch: the old policy is the current one
                batch = replace(batch, old_logprobs=out.logprobs.detach())
            loss = objective(run.hooks, batch, out, how, denominator, "all_rows" in run.needs)
            loss.backward()
            parts.append((float(loss.detach()), _gap(batch, run.policies), taken(run.plugins)))
    parts = run.gather(parts)
    add(cycle.metrics, "update/loss", sum(loss for loss, _, _ in parts))
    add(cycle.metrics, "update/max_logprob_gap", max((gap for _, gap, _ in parts), default=0.0))
    for name, value, weight in (line for _, _, logged in parts for line in logged):
        add(cycle.metrics, name, value, weight)


def _gap(batch: Batch, policies: Mapping[str, object]) -> float:
    """Largest difference between sampler and trainer before the update, nats, of the tokens that a policy of the run sampled."""
    own = torch.tensor([name in policies for name in batch.rollouts.policy], device=batch.mask.device)
    gap = (batch.old_logprobs - batch.sampler_logprobs).abs().masked_fill(~(batch.mask & own[:, None]), 0)
    return float(gap.max())


def _clip(parameters: list[Tensor], max_norm: float) -> float:
    """Clip the global 2-norm; returns the norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm else math.inf)
    return float(norm)
