"""A reference that follows the policy (DeepSeekMath, arXiv:2402.03300, sec. 4.1.4; DeepSeek-R1, arXiv:2501.12948).

    after every `every` steps:   theta_ref <- share theta + (1 - share) theta_ref      share 1: a copy, below: a moving mean

It changes what ref_logprobs mean and nothing else, so it stacks with every plugin that reads them (kl,
plugins.grpo.kl_coef). A refreshed reference is part of the checkpoint; before that it is the policy at the start.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, UserError, hookimpl


class Reference(Plugin):
    """`algo=[kl,reference]`."""

    metrics = {"refreshed": "0 or 1: the reference moved after this step"}

    @dataclass
    class Config:
        every: int = 400  # steps, at least 1; published 400 (R1), 512 (TRL's default)
        share: float = 1.0  # of the policy, 0 < share <= 1; published 1 (R1), 0.6 (TRL's default)

        def __post_init__(self):
            if self.every < 1:
                raise ValueError(f"every is at least 1 step, got {self.every}")
            if not 0 < self.share <= 1:
                raise ValueError(f"share lies in (0, 1], got {self.share}")

    def __init__(self, config):
        super().__init__(config)
        self.reference, self.moved = None, False

    @hookimpl
    def validate(self, active):
        if "ref_logprobs" not in active.needs:
            raise UserError(
                f"plugins.{self.name}: nothing in this run compares with a reference policy\n"
                f"add what does (algo=[kl,{self.name}] or plugins.grpo.kl_coef=0.04), or drop it with ~plugins.{self.name}"
            )

    @hookimpl
    def setup(self, run):
        self.reference = run.reference

    @hookimpl
    def after_step(self, step, run):
        due = step % self.config.every == 0
        if due:
            self.reference.mix(run.policy, self.config.share)
            self.moved = True
        self.log("refreshed", due)

    def state_dict(self):
        if not self.moved:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self.reference.model.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.moved = bool(state)
        if state:
            for name, value in self.reference.model.named_parameters():
                value.copy_(state[name])
