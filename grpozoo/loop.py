"""The algorithm. It calls hooks and folds their answers; whatever a method changes, it changes through a hook."""

from dataclasses import replace

import torch

from grpozoo.cycle import Cycle, minibatches
from grpozoo.metrics import absorb, means
from grpozoo.types import Request, Rewards, Rollouts
from grpozoo.update import optimizer_step


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
    run.clock.start()
    prompts = run.prompts(config.prompts_per_step)
    samples = tuple(range(config.group_size))
    rollouts = run.generate([Request(prompt, group, samples) for group, prompt in enumerate(prompts)])
    rewards = run.score(rollouts)
    rollouts, rewards = hooks.resample(rollouts=rollouts, rewards=rewards, run=run)
    with run.timer("time/measure_s"):
        rollouts = run.measure(rollouts)
    rewards = add_token_rewards(hooks.token_rewards(rollouts=rollouts, run=run), rollouts, rewards)
    advantages = per_token(hooks.advantage(rollouts=rollouts, rewards=rewards, run=run), rollouts, rewards)
    hooks.before_update(rollouts=rollouts, rewards=rewards, advantages=advantages, run=run)
    plan = minibatches(len(rollouts), config.update.mini_batches, config.update.epochs, config.seed, run.step)
    metrics = absorb(run.observe(rollouts, rewards), run.plugins)
    return Cycle(rollouts, rewards, advantages, plan, metrics=metrics)


def add_token_rewards(answers: list[torch.Tensor], rollouts: Rollouts, rewards: Rewards) -> Rewards:
    """Rewards of single tokens [R, T] from several plugins, added up and into the totals."""
    if not answers:
        return rewards
    tokens = sum(answer.double().masked_fill(~rollouts.completion_mask, 0.0) for answer in answers)
    return replace(rewards, tokens=tokens, total=rewards.total + tokens.sum(1))


def per_token(advantages: torch.Tensor, rollouts: Rollouts, rewards: Rewards) -> torch.Tensor:
    """[R] or [R, T] -> [R, T] float32: 0 where masked and for rows without a reward."""
    mask = rollouts.completion_mask
    wide = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
    return wide.float().masked_fill(~mask | rewards.total.isnan()[:, None], 0.0)


def finish(run) -> None:
    """The step's updates are done: metrics, evaluation, checkpoint."""
    config, cycle = run.config, run.cycle
    run.step += 1
    run.cycle = None
    metrics = run.clock.step(cycle)
    run.hooks.after_step(step=run.step, metrics=metrics, run=run)
    metrics |= means(absorb({}, run.plugins))
    last = run.step == config.steps
    if last or (config.eval.every and run.step % config.eval.every == 0):
        metrics |= run.evaluate()
    run.record(run.step, metrics, cycle)
    if last or (config.checkpoint.every and run.step % config.checkpoint.every == 0):
        run.save()
