"""Clip-Cov: a random few of the tokens that drive entropy down are left out (arXiv:2505.22617, sec. 4).

    cov_it  = (A_it - mean_m(A)) (logp_it - mean_m(logp))          of the current policy, no gradient
    n       = max(floor(r N), 1)                                   N tokens in the optimizer step
    E       = {tokens that the clip spares, lower < cov < upper}
    D       = min(n, |E|) tokens of E, drawn uniformly without replacement
    loss_it = 0 on D, else -min(w A, clip(w, 1 - clip, 1 + clip_high) A)

A dropped token still counts in every denominator. Means, N and the draw are over the whole optimizer step. The published
loss is a mean over tokens (`plugins.grpo.aggregation=token_mean`) and its clip of 1 almost never binds. The draw goes by
the identity of a token (prompt, sample, position), so neither row order nor the number of processes changes it.

It reads the size of A, so it wants the advantage that the loss uses; it stacks on any. It is a policy_loss, and therefore
takes the place of every other surrogate; token weights multiply what it keeps.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, clip_surrogate, hookimpl, importance_ratio, masked_mean, top_k_mask


class ClipCov(Plugin):
    """`algo=clip_cov`."""

    controls = frozenset({"entropy"})
    metrics = {
        "eligible": "share of tokens, 0 to 1: |E| / N, those whose covariance lies between the bounds",
        "dropped": "share of tokens, 0 to 1: |D| / N, those left out of the loss",
    }

    @dataclass
    class Config:
        share: float = 2e-4  # r, share of tokens that is dropped, 0 to 1; one at least, if any is eligible
        lower: float = 1.0  # covariance above which a token may be dropped, nats
        upper: float = 5.0  # covariance below which a token may be dropped, nats
        clip: float = 1.0  # lower end of the ratio range is 1 - clip
        clip_high: float = 1.0  # upper end is 1 + clip_high

        def __post_init__(self):
            if not 0 <= self.share <= 1:
                raise ValueError(f"share lies in [0, 1], got {self.share}")
            if not self.lower < self.upper:
                raise ValueError(f"lower is below upper, got {self.lower} and {self.upper}")
            for name in ("clip", "clip_high"):
                if not getattr(self, name) >= 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    def __init__(self, config):
        super().__init__(config)
        self.update = 0  # optimizer steps of this step so far: each draws its own numbers

    @hookimpl
    def before_update(self):
        self.update = 0

    @hookimpl
    def minibatch(self, batch, out, run):
        mask, N = batch.mask, max(int(batch.mask.sum()), 1)
        A, logp = batch.advantages.double(), out.logprobs.double()  # [n, T]
        cov = (A - masked_mean(A, mask)) * (logp - masked_mean(logp, mask))
        ratio = importance_ratio(out.logprobs, batch.old_logprobs)
        clipped = self.surrogate(batch, ratio) > -ratio * batch.advantages
        eligible = mask & ~clipped & (cov > self.config.lower) & (cov < self.config.upper)
        dropped = top_k_mask(self.lots(batch, run), eligible, max(int(self.config.share * N), 1))
        self.update += 1
        self.log("eligible", int(eligible.sum()) / N, N)
        self.log("dropped", int(dropped.sum()) / N, N)
        return {f"{self.name}/dropped": dropped}

    @hookimpl
    def policy_loss(self, batch, out):
        ratio = importance_ratio(out.logprobs, batch.old_logprobs)  # [r, T]
        return self.surrogate(batch, ratio).masked_fill(batch.tables[f"{self.name}/dropped"], 0.0)

    def state_dict(self):
        return {"update": self.update}

    def load_state_dict(self, state):
        self.update = state.get("update", 0)

    def surrogate(self, batch, ratio):
        return clip_surrogate(ratio, batch.advantages, self.config.clip, self.config.clip_high)

    def lots(self, batch, run):
        """[n, T] float64: a uniform number for each token; those with the highest are drawn.

        Rows take their numbers in the order of what they are. The group, whose id is only a name, tells apart two
        groups of one prompt and decides nothing else.
        """
        rows = batch.rollouts
        prompts = [prompt.id for prompt in rows.prompts]
        identity = list(zip(prompts, rows.tag, rows.sample_id.tolist(), rows.group_id.tolist(), strict=True))
        order = sorted(range(len(rows)), key=identity.__getitem__)
        numbers = run.stream(self.name, self.update).random(int(batch.mask.sum()))
        lots = torch.zeros(batch.mask.shape, dtype=torch.float64)
        place = batch.mask[order].nonzero()  # token by token, in the order of the rows' identities
        lots[torch.tensor(order)[place[:, 0]], place[:, 1]] = torch.from_numpy(numbers)
        return lots
