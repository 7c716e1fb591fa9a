"""Rollouts for reward tests: texts and what they are compared with; token ids are of no interest."""

import pluggy
import torch

from grpozoo import Prompt, Rollouts, hooks
from grpozoo.rewards.score import score


def rows(texts, answers=None, lengths=None, prompts=None):
    """One row for each text; prompt i has the id `p<i>` and the given answer."""
    count = len(texts)
    prompts = prompts or [
        Prompt(f"p{i}", text=f"question {i}", answer=answer) for i, answer in enumerate(answers or [None] * count)
    ]
    lengths = torch.tensor(lengths or [1] * count, dtype=torch.int64)
    mask = torch.arange(int(lengths.max()) if count else 1) < lengths[:, None]  # [R, T]
    return Rollouts(
        prompts=tuple(prompts),
        group_id=torch.zeros(count, dtype=torch.int64),
        sample_id=torch.arange(count),
        prompt_ids=((1,),) * count,
        completion_ids=mask.long(),
        completion_mask=mask,
        logprobs=torch.zeros(mask.shape),
        finish_reason=("stop",) * count,
        text=tuple(texts),
        tag=("train",) * count,
        policy=("policy",) * count,
    )


def rewards_of(plugins, rollouts, run=None, timeout=20.0):
    """`score` through a real plugin manager; plugins: name -> plugin."""
    manager = pluggy.PluginManager("grpozoo")
    manager.add_hookspecs(hooks)
    for name, plugin in plugins.items():
        plugin.name = name
        manager.register(plugin, name)
    return score(manager.hook, plugins, rollouts, run, timeout=timeout)


def column(plugin, name, rollouts, run=None):
    """The plugin's only component, as a list with None for "no answer"."""
    values = rewards_of({name: plugin}, rollouts, run).components[name].tolist()
    return [None if value != value else value for value in values]
