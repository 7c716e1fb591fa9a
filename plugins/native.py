"""The native engine: grpozoo's own decode loop for any causal language model of transformers.

Prompts are prefilled once per group, the cache is expanded to the siblings and written in place, finished rows leave
the batch, and the sampler plugin is asked for every token. Its plain twin is `engine=hf`.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl
from grpozoo.rollout import decode


class Native(Plugin):
    """`engine=native`."""

    @dataclass
    class Config:
        rows: int = 512  # completions decoded at the same time; more memory, more tokens per second

        def __post_init__(self):
            if self.rows < 1:
                raise ValueError(f"rows is at least 1, got {self.rows}")

    @hookimpl
    def generate(self, requests, sampler, law, policy, run):
        return decode(
            requests,
            sampler,
            law,
            policy,
            max_tokens=run.config.max_completion_length,
            max_prompt_length=run.config.max_prompt_length,
            seed=run.config.seed,
            step=run.step,
            rows_at_once=self.config.rows,
        )
