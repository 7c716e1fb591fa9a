"""Steps for tests of surrogates: random ones far from the old policy, the worked example on it, and what a plugin logs."""

from dataclasses import replace

import torch

from grpozoo import aggregate
from grpozoo.testing import assemble, compose, fixture


def on_policy(step):
    """The same step with the current policy equal to the old one: every ratio is 1."""
    return step._replace(out=replace(step.out, logprobs=step.batch.old_logprobs.clone().requires_grad_()))


def random_step(seed, spread=1.5):
    """Six completions of 1 to 7 tokens, log ratios of about +-2 spread, a random advantage for each completion."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 8, (6,), generator=generator).tolist()
    old = -normal[0].abs() - 0.05  # nats
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": old.abs()}
    step = assemble(lengths, [0, 0, 0, 1, 1, 1], [0.0] * 6, tables, (old + spread * normal[1]).clamp(max=-1e-3))
    return with_advantages(step, torch.randn(6, 1, generator=generator, dtype=torch.float64))


def with_advantages(step, advantages):
    """Other advantages, [R, 1] or [R, T]."""
    wide = advantages.expand(step.batch.mask.shape).masked_fill(~step.batch.mask, 0)
    return step._replace(batch=replace(step.batch, advantages=wide))


def surrogate(plugin, step):
    """The plugin's losses [R, T], 0 where masked, and the gradient [R, T] of their seq_mean."""
    batch, logprobs = step.batch, step.out.logprobs.detach().clone().requires_grad_()
    losses = plugin.policy_loss(batch=batch, out=replace(step.out, logprobs=logprobs))
    value = aggregate(losses, batch.mask, "seq_mean", len(batch.mask))
    return losses.detach().expand(batch.mask.shape).masked_fill(~batch.mask, 0), torch.autograd.grad(value, logprobs)[0]


def logged(name, *overrides, step=None):
    """What `algo=NAME` logs about the worked example: name without prefix -> value."""
    step, (_, active) = step or fixture(), compose(f"algo={name}", *overrides)
    active.hooks.policy_loss(batch=step.batch, out=step.out)
    assert {weight for _, _, weight in active.plugins[name].logged} <= {float(step.batch.mask.sum())}  # per token
    return {key.removeprefix(f"{name}/"): value for key, value, _ in active.plugins[name].logged}


def notices(*overrides):
    """What is printed before the run."""
    config, active = compose(*overrides)
    return [notice for notice in active.hooks.validate(config=config, active=active) if notice]
