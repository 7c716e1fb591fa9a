"""The algorithm. It calls hooks and folds their answers; whatever a method changes, it changes through a hook."""

import time

import torch

from grpozoo.errors import UserError
from grpozoo.types import Request, Rewards, Rollouts
from grpozoo.update import Cycle, minibatches, optimizer_step


def train(run) -> None:
    """Train until `run.config.steps` steps are done or somebody asks to stop. Every step may be interrupted and resumed."""
    if run.step == 0 and run.cycle is None:
        run.record(0, run.evaluate())
    while run.step < run.config.steps:
        if run.cycle is None:
            run.cycle = collect(run)
            if run.stopping():
                return run.save()
        while run.cycle.done < len(run.cycle.minibatches):
            with run.timer("time/update_s"):
                optimizer_step(run, run.cycle)
            if run.stopping():
                return run.save()
        finish(run)
        if run.stopping() and run.step < run.config.steps:
            return run.save()
    run.finished()


def collect(run) -> Cycle:
    """Prompts, completions, rewards, advantages: everything a step knows before its first update."""
    config, hooks = run.config, run.hooks
    run.began = time.perf_counter()
    prompts = hooks.prepare_prompts(prompts=run.data.take(config.prompts_per_step), run=run)
    samples = tuple(range(config.group_size))
    with run.timer("time/generate_s"):
        rollouts = run.generate([Request(prompt, group, samples) for group, prompt in enumerate(prompts)])
    with run.timer("time/reward_s"):
        rewards = run.score(rollouts)
    rollouts, rewards = hooks.resample(rollouts=rollouts, rewards=rewards, run=run)
    advantages = per_token(hooks.advantage(rollouts=rollouts, rewards=rewards, run=run), rollouts, rewards)
    with run.timer("time/measure_s"):
        rollouts = run.measure(rollouts)
    hooks.before_update(rollouts=rollouts, rewards=rewards, advantages=advantages, run=run)
    plan = minibatches(len(rollouts), config.update.mini_batches, config.update.epochs, config.seed, run.step)
    return Cycle(rollouts, rewards, advantages, plan, metrics=run.observe(rollouts, rewards))


def per_token(advantages: torch.Tensor, rollouts: Rollouts, rewards: Rewards) -> torch.Tensor:
    """[R] or [R, T] -> [R, T] float32: 0 where masked and for rows without a reward; anything not finite is an error."""
    mask = rollouts.completion_mask
    if advantages.shape not in (mask.shape[:1], mask.shape):
        raise UserError(
            f"advantage() must return one number per row {tuple(mask.shape[:1])} or token {tuple(mask.shape)}, got {tuple(advantages.shape)}"
        )
    wide = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
    wide = wide.float().masked_fill(~mask | rewards.total.isnan()[:, None], 0.0)
    if not bool(wide.isfinite().all()):
        row = int((~wide.isfinite()).any(1).nonzero()[0])
        raise UserError(
            f"advantage() is not finite for prompt {rollouts.prompts[row].id!r}, sample {int(rollouts.sample_id[row])}"
        )
    return wide


def finish(run) -> None:
    """The step's updates are done: metrics, evaluation, checkpoint."""
    config, cycle = run.config, run.cycle
    run.step += 1
    run.cycle = None
    metrics = run.step_metrics(cycle)
    run.hooks.after_step(step=run.step, metrics=metrics, run=run)
    metrics |= run.plugin_metrics()
    last = run.step == config.steps
    if last or (config.eval.every and run.step % config.eval.every == 0):
        metrics |= run.evaluate()
    run.record(run.step, metrics, cycle)
    if last or (config.checkpoint.every and run.step % config.checkpoint.every == 0):
        run.save()
