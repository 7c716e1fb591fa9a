"""GSPO: group sequence policy optimisation (arXiv:2507.18071, sec. 4).

    s_i   = exp(1/L_i sum_t (logp_t - logp_old_t))                     eq. 7: one ratio per completion
    loss  = -min(s_i A_i, clip(s_i, 1 - clip, 1 + clip_high) A_i)      eq. 5, per completion
    total = 1/B sum_i loss_i                                           aggregation seq_mean
    s_it  = sg[s_i] pi_t / sg[pi_t]                                    eq. 14, the token form; sg stops the gradient

s_i is a geometric mean: it is no unbiased weight of the sequence, but its spread shrinks with the length and every
length has the same range. log s is clamped at 10. With one advantage per row the token form has the value, the clip
decision and the gradient of s_i, so `form=auto` takes it exactly when something acts on single tokens: advantages that
vary over a row, or a plugin that weighs tokens or wraps policy_loss. Such weights then act on their tokens, not only
through their mean over the row. It stacks on any advantage.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo import Plugin, UserError, clip_surrogate, hookimpl, masked_mean

Form = Enum("Form", ["auto", "sequence", "token"])


class Gspo(Plugin):
    """`algo=gspo`; `algo=gspo_paper` has the published range."""

    metrics = {
        "clipped_rows": "share of completions, 0 to 1: some of its tokens are clipped (10 to 50 % is usual)",
        "clipped_tokens": "share of tokens, 0 to 1: they belong to a clipped ratio and have no gradient",
        "token_form": "0 or 1: the ratio is that of eq. 14, because something acts on single tokens",
    }

    @dataclass
    class Config:
        form: Form = Form.auto  # sequence: [r, 1], refuses token-wise advantages; token: eq. 14; auto: as needed
        clip: float = 0.05  # lower end of the range of s is 1 - clip; published 3e-4 for thousands of tokens
        clip_high: float | None = None  # upper end is 1 + clip_high; null: clip; published 4e-4

        def __post_init__(self):
            for name in ("clip", "clip_high"):
                if (getattr(self, name) or 0) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    def __init__(self, config):
        super().__init__(config)
        self.weighing = False  # whether other plugins may treat the tokens of a row differently

    @hookimpl
    def validate(self, config, active):
        notices, others = [], self.weighers(active.hooks)
        if config.update.per_batch == 1:
            notices.append(f"{self.name}: with one update per batch every ratio is 1, so this is GRPO with seq_mean")
        if others and self.config.form is Form.auto:
            notices.append(f"{self.name}: token form (eq. 14), because of {', '.join(others)}")
        return "\n".join(notices)

    @hookimpl
    def setup(self, run):
        self.weighing = bool(self.weighers(run.hooks))

    @hookimpl
    def policy_loss(self, batch, out):
        low, high = self.config.clip, self.config.clip if self.config.clip_high is None else self.config.clip_high
        A, mask = batch.advantages, batch.mask
        logp = out.logprobs.masked_fill(~mask, 0)  # [r, T]
        log_s = masked_mean(logp - batch.old_logprobs, mask, dim=1)[:, None]  # [r, 1]
        first = A.gather(1, mask.int().argmax(1, keepdim=True))  # [r, 1], of the row's first token
        if self.by_token(bool(((first != A) & mask).any())):
            log_s = log_s.detach() + (logp - logp.detach())  # [r, T]
        else:
            A = first
        s = log_s.clamp(max=10).exp()
        clipped = (((s < 1 - low) & (A < 0)) | ((s > 1 + high) & (A > 0))) & mask  # [r, T]
        tokens, rows = int(mask.sum()), int(mask.any(1).sum())
        self.log("clipped_tokens", clipped.sum() / max(tokens, 1), tokens)
        self.log("clipped_rows", clipped.any(1).sum() / max(rows, 1), rows)
        self.log("token_form", s.shape == mask.shape, rows)
        return clip_surrogate(s, A, low, high)

    @hookimpl
    def aggregation(self):
        return "seq_mean"

    def by_token(self, varying):
        """Whether the token form is due; varying: some row has more than one advantage."""
        if varying and self.config.form is Form.sequence:
            raise UserError(
                f"plugins.{self.name}.form=sequence has one ratio and one advantage per completion, but the advantages "
                f"vary over its tokens\nuse plugins.{self.name}.form=auto or algo=gspo_token"
            )
        return self.config.form is Form.token or (self.config.form is Form.auto and (varying or self.weighing))

    def weighers(self, hooks):
        """Names of the plugins that weigh tokens or wrap policy_loss."""
        wrappers = [impl for impl in hooks.policy_loss.get_hookimpls() if impl.wrapper or impl.hookwrapper]
        return sorted({impl.plugin_name for impl in [*hooks.token_weights.get_hookimpls(), *wrappers]})
