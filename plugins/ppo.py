"""PPO with a critic (arXiv:1707.06347, sec. 3 and 5; GAE: arXiv:1506.02438, sec. 3), which the group baseline replaced.

    V_t     = u . h_t + b                                 h_t: last hidden state before token t; u = b = 0 at the start
    r_t     = token reward (KL penalty); at the last token the rest of the completion's reward on top
    delta_t = r_t + gamma V_{t+1} - V_t                   V = 0 after the last token, also of a truncated completion
    A_t     = sum_k (gamma lam)^k delta_{t+k}
    R_t     = A_t + V_t                                   before A is whitened over all tokens of the batch
    loss    = the clipped surrogate of GRPO (plugins.grpo.clip), mean over tokens
    critic  = 1/2 max((V - R)^2, (clip(V, V_old - clip_value, V_old + clip_value) - R)^2)    mean over tokens

h comes from a second model (the policy's copy at the start, trained along with the head), or from the policy itself
without gradient. The critic has an optimizer of its own and is trained before the policy's updates, so the usual
coefficient of its loss would only move the norm at which its gradient is clipped: there is none. Masked tokens inside
a completion are passed over. A row without a reward has A = 0 and does not teach the critic. Groups play no part, one
completion per prompt is enough. It stacks with whatever shapes rewards, weights tokens or adds a regularizer;
token rewards (kl with form=reward) take their place in the returns.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from grpozoo import Plugin, UserError, hookimpl, masked_mean, whiten

Critic = Enum("Critic", ["model", "head"])


class Ppo(Plugin):
    """`algo=ppo`."""

    metrics = {
        "value_loss": "squared reward: the critic's loss, mean over tokens and its optimizer steps (falls)",
        "explained_variance": "share, at most 1: 1 - var(R - V) / var(R) before the critic's update (rises)",
        "value_mean": "reward: mean of V over tokens before the critic's update (near the mean reward)",
        "critic_mb": "MB (1e6 bytes): the critic's parameters and optimizer state, which GRPO does without",
    }

    @dataclass
    class Config:
        gamma: float = 1.0  # discount per token, (0, 1]
        lam: float = 0.95  # GAE's lambda, [0, 1]; TRL 0.95, verl 1.0; DeepSeek-R1 found 1.0 better
        whiten: bool = True  # A -> (A - mean) / std over the batch's tokens
        critic: Critic = Critic.model  # model: a second model; head: linear on the policy's hidden states
        critic_lr: float | None = None  # constant AdamW learning rate; null: lr
        critic_epochs: int | None = None  # the critic's passes over a batch; null: update.epochs
        critic_minibatches: int | None = None  # its optimizer steps per pass; null: update.mini_batches
        clip_value: float = 0.2  # V may move this far from V_old, reward units, above 0; TRL 0.2, verl 0.5

        def __post_init__(self):
            if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1):
                raise ValueError(f"gamma lies in (0, 1], lam in [0, 1], got {self.gamma} and {self.lam}")
            if not self.clip_value > 0:
                raise ValueError(f"clip_value is above 0, got {self.clip_value}")
            for name, low in dict(critic_lr=0, critic_epochs=1, critic_minibatches=1).items():
                if getattr(self, name) is not None and getattr(self, name) < low:
                    raise ValueError(f"{name} is at least {low}, got {getattr(self, name)}")

    pending = None  # (mask, V_old, R), each [R, T], handed from advantage() to before_update()

    @hookimpl
    def setup(self, run):
        own, optim, lr = self.config.critic is Critic.model, run.config.optim, self.config.critic_lr
        self.model = run.policy.copy() if own else run.policy
        self.extra = list(self.model.model.parameters()) if own else []
        backbone = list(self.model.backbone.parameters()) if own else []
        device = self.model.device
        with torch.no_grad():
            width = self.model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=device), None, None).shape[-1]
        self.head = [torch.zeros(size, device=device) for size in (width, 1)]  # u, b
        self.trained = [parameter.requires_grad_() for parameter in [*backbone, *self.head]]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=run.config.lr if lr is None else lr, betas=tuple(optim.betas), eps=optim.eps,
            weight_decay=optim.weight_decay, fused=True,
        )  # fmt: skip

    @hookimpl
    def advantage(self, rollouts, rewards, run):
        mask = rollouts.completion_mask & ~rewards.total.isnan()[:, None]  # [R, T]
        V = self.values(rollouts, run).double()
        if not bool(V[mask].isfinite().all()):
            raise UserError(f"the critic's values are not finite: lower plugins.{self.name}.critic_lr")
        r = torch.zeros_like(V) if rewards.tokens is None else rewards.tokens.clone()
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # the last token of each row
        r = r + last * (rewards.total.nan_to_num(0.0) - r.sum(1))[:, None]
        A = gae(r, V, mask, self.config.gamma, self.config.lam)
        self.pending = mask, V, A + V
        return whiten(A, mask) if self.config.whiten else A

    @hookimpl
    def before_update(self, rollouts, run):
        if self.pending is None or not bool(self.pending[0].any()):  # advantages made elsewhere; nothing to learn from
            return
        (mask, V, R), self.pending = self.pending, None
        tokens, variance = int(mask.sum()), float(R[mask].var(correction=0))
        self.log("value_mean", masked_mean(V, mask), tokens)
        if variance > 1e-12:  # returns that differ by more than rounding
            self.log("explained_variance", 1 - float((R - V)[mask].var(correction=0)) / variance, tokens)
        rows, count = len(rollouts), self.config.critic_minibatches or run.config.update.mini_batches
        for epoch in range(self.config.critic_epochs or run.config.update.epochs):
            order = run.stream(self.name, "critic", epoch).permutation(rows).tolist()
            for part in range(count):
                self.learn(rollouts, order[part * rows // count : (part + 1) * rows // count], mask, V, R, run)
        self.optimizer.zero_grad(set_to_none=True)  # no memory for gradients while the policy trains
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in [*self.extra, *self.head, *states])
        self.log("critic_mb", size / 1e6)

    @hookimpl
    def aggregation(self):
        return "token_mean"

    def state_dict(self):
        return {"trained": [tensor.detach() for tensor in self.trained], "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state):
        if state:
            for own, saved in zip(self.trained, state["trained"], strict=True):
                own.copy_(saved)
            self.optimizer.load_state_dict(state["optimizer"])

    def learn(self, rollouts, rows, mask, V_old, R, run):
        """One optimizer step of the critic on the given rows; each process takes its share of them."""
        rows = [row for row in rows if bool(mask[row].any())]
        tokens, total = int(mask[rows].sum()), torch.zeros((), dtype=torch.float64)
        if not tokens:
            return
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        with self.model.training(run.config.update.gradient_checkpointing and bool(self.extra)):
            for micro, part in run.mine(rollouts, rows):
                live = part.completion_mask
                V = self.predict(part, run)  # [N]
                old, target = (table[micro, : live.shape[1]][live].to(V) for table in (V_old, R))
                loss = value_loss(V, old, target, self.config.clip_value).sum() / tokens
                loss.backward()
                total += loss.detach().cpu()
        run.sum_gradients(self.trained)
        norm = torch.nn.utils.clip_grad_norm_(self.trained, run.config.optim.max_grad_norm or torch.inf)
        if not bool(norm.isfinite()):
            raise UserError(f"the critic's gradient is not finite: lower plugins.{self.name}.critic_lr")
        self.optimizer.step()
        self.log("value_loss", run.sum(total), tokens)

    @torch.no_grad()
    def values(self, rollouts, run):
        """V before each token [R, T] float32, 0 where masked; each process computes its share."""
        V = torch.zeros(rollouts.completion_mask.shape)
        for micro, part in run.mine(rollouts, list(range(len(rollouts)))):
            live = part.completion_mask
            V[micro, : live.shape[1]] = torch.zeros(live.shape).masked_scatter(live, self.predict(part, run).cpu())
        return run.sum(V)

    def predict(self, rollouts, run):
        """V before each token [N] float32, in the order of the mask; with gradient where it is enabled."""
        update = run.config.update
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(self.extra)):
            h = self.model.states(rollouts, update.shared_prefix and not update.gradient_checkpointing)  # [N, d]
        u, b = self.head
        return h.float() @ u + b


def gae(r, V, mask, gamma, lam):
    """A [R, T], 0 where masked; masked tokens hand on what follows them."""
    A = torch.zeros_like(r)
    ahead, V_next = r.new_zeros(len(r)), r.new_zeros(len(r))  # A and V of the next token that counts
    for t in reversed(range(r.shape[1])):
        delta = r[:, t] + gamma * V_next - V[:, t]
        ahead = torch.where(mask[:, t], delta + gamma * lam * ahead, ahead)
        V_next = torch.where(mask[:, t], V[:, t], V_next)
        A[:, t] = ahead.masked_fill(~mask[:, t], 0.0)
    return A


def value_loss(V, V_old, R, clip_value):
    """The critic's loss, elementwise."""
    clipped = V.clamp(V_old - clip_value, V_old + clip_value)
    return 0.5 * ((V - R) ** 2).maximum((clipped - R) ** 2)
