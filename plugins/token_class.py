"""Token-class weights: a marked kind of token has its own mean in the loss (ATLAS's LA-GRPO, arXiv:2605.15198).

    M    = tokens of the optimizer step whose text contains the pattern
    w_it = 1 + alpha N / |M| on M, 1 elsewhere            N tokens in the optimizer step; all 1 if M is empty
    loss = 1/N sum w_it loss_it = L + alpha 1/|M| sum_M loss_it

So a rare kind weighs alpha against the rest, however long the completions are. That reading holds for a mean over tokens, and
the plugin answers aggregation with it. A token is matched alone, as it decodes without its neighbours; special tokens
decode to nothing and never match. ATLAS marks five added tokens for image operations; arithmetic has its operators.

A weight is a factor of the policy loss: it stacks on any advantage and any per-token surrogate, and with other weights as
a product. With alpha 0 it is the base method under token_mean, bit for bit.
"""

import re
from dataclasses import dataclass

import torch

from grpozoo import Plugin, hookimpl


class TokenClass(Plugin):
    """`algo=token_class`."""

    metrics = {"marked": "share of tokens, 0 to 1: |M| / N"}

    @dataclass
    class Config:
        pattern: str = "[-+*/=]"  # regular expression that is searched for in the text of each token
        alpha: float = 0.1  # weight of M's mean, at least 0; the paper states none, 0.05 to 0.5 is a sensible range

        def __post_init__(self):
            try:
                everything = re.search(self.pattern, "") is not None
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
            if everything:
                raise ValueError(f"pattern matches the empty text, so it would mark every token: {self.pattern!r}")
            if not self.alpha >= 0:
                raise ValueError(f"alpha is at least 0, got {self.alpha}")

    def __init__(self, config):
        super().__init__(config)
        self.known: dict[int, bool] = {}  # token id -> whether it is in the class

    @hookimpl
    def minibatch(self, batch, out, run):
        mask, ids = batch.mask, batch.rollouts.completion_ids
        present = ids[mask].unique()
        members = [i for i in present.tolist() if self.member(i, run.policy)]
        M = mask & torch.isin(ids, torch.tensor(members, dtype=ids.dtype))  # [n, T]
        N, size = int(mask.sum()), int(M.sum())
        self.log("marked", size / max(N, 1), N)
        weights = torch.ones_like(out.logprobs)
        weights[M] += self.config.alpha * N / max(size, 1)
        return {f"{self.name}/weights": weights}

    @hookimpl
    def token_weights(self, batch):
        return batch.tables[f"{self.name}/weights"]

    @hookimpl
    def aggregation(self):
        return "token_mean"

    def member(self, token, policy):
        if token not in self.known:
            self.known[token] = re.search(self.config.pattern, policy.decode([token])) is not None
        return self.known[token]
