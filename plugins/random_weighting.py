"""Random weighting: one answer, and a weighting of its components that belongs to the prompt; VPO's ablation (arXiv:2605.22817).

    w ~ Dir(1_d)         drawn once for each prompt of a run, not shown to the policy
    R_g = max_i w . M_gi            M_g [m, d]: the rewards of the completion's answers, as a rule one; 0 if there is none

A prompt keeps its w when it comes again, and all completions of a group share it: GRPO sees another trade-off at each
prompt, and cannot answer one prompt with several. Without a vector reward the components are the rewards of weight
other than 0.

R replaces the total of the rewards: it stacks on any advantage, loss and weight, but not on what reads the components.
"""

from dataclasses import dataclass, replace

import torch

from grpozoo import Plugin, hookimpl
from grpozoo.rewards.answers import vector_name
from grpozoo.rng import stream


class RandomWeighting(Plugin):
    """`algo=random_weighting`."""

    conflicts = {
        "gdpo": "gdpo reads reward components, and random_weighting changes the total",
        "process": "process reads the rewards of steps, and random_weighting changes the total",
    }
    metrics = {"weighted": "reward: w . r of a completion's best answer, mean; this is what is trained on"}

    @dataclass
    class Config:
        component: str | None = None  # name of the vector reward; null: the only one, or the rewards themselves

    @hookimpl(wrapper=True)
    def transform_rewards(self, rollouts, rewards, run):
        rewards = yield
        if set(rollouts.tag) == {"eval"}:
            return rewards
        R = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)  # NaN: the reward had no answer
        for row, M in enumerate(self.matrices(rewards)):
            answered = M[~M.isnan().any(1)]
            if len(answered):
                w = stream(run.config.seed, self.name, rollouts.prompts[row].id).dirichlet([1.0] * M.shape[1])  # [d]
                R[row] = (answered @ torch.from_numpy(w)).max()
            elif not len(M):
                R[row] = 0.0
        known = R[~R.isnan()]
        self.log("weighted", known.mean() if len(known) else 0.0, len(known))
        return replace(rewards, total=R)

    def matrices(self, rewards):
        """[m, d] of each row."""
        name = vector_name(self.name, self.config.component, rewards)
        if name is not None:
            return rewards.vectors[name]
        names = [name for name in rewards.components if rewards.weights[name]]
        return torch.stack([rewards.components[name] for name in names], 1)[:, None]  # [R, 1, d]
