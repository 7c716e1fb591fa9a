"""GMPO: the geometric mean of a completion's clipped token ratios (arXiv:2507.20673).

    x_t  = logp_t - logp_old_t                       log ratio of a token, nats
    y_t  = min(x_t, clip(x_t, -clip, clip))          A > 0: not above clip
         = max(x_t, clip(x_t, -clip, clip))          A < 0: not below -clip
    loss = -exp(1/L sum_t y_t) A                     one for each completion
    total = mean of the losses over completions      aggregation seq_mean, and only that

A single outlier moves the geometric mean little, so the range e^-0.4 to e^0.4 is wider than PPO's. The tokens that are
not clipped share the gradient -exp(..) A / L equally, the clipped ones get 0.
It stacks on any advantage that is one number per completion. It refuses those that differ among tokens, and weights of
single tokens, which would scale the completion by their mean: gspo_token takes both.
"""

from dataclasses import dataclass

from grpozoo import Plugin, UserError, hookimpl, masked_mean

TOKENS = "gmpo has one ratio and one advantage per completion, and this acts on single tokens (gspo_token takes it)"


class Gmpo(Plugin):
    """`algo=gmpo`."""

    conflicts = dict.fromkeys(
        ("entropy_advantage", "entropy_mask", "ppo", "process", "stare", "steer", "token_class"), TOKENS
    )
    metrics = {"clipped": "share of tokens, 0 to 1: log ratio above clip with A > 0, or below -clip with A < 0"}

    @dataclass
    class Config:
        clip: float = 0.4  # e, nats: the ratio range is (exp(-clip), exp(clip)); at least 0

        def __post_init__(self):
            if self.clip < 0:
                raise ValueError(f"clip is at least 0 nats, got {self.clip}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} is GRPO with aggregation seq_mean while there is one update per batch: every "
                "ratio is 1; set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        A = self.per_row(batch)  # [r, 1]
        x = (out.logprobs - batch.old_logprobs).clamp(-20, 20)  # [r, T]
        y = x.clamp(max=self.config.clip).where(A > 0, x.clamp(min=-self.config.clip))
        self.log("clipped", masked_mean((y != x) & (A != 0), batch.mask), int(batch.mask.sum()))
        return -masked_mean(y, batch.mask, dim=1)[:, None].exp() * A

    @hookimpl
    def aggregation(self):
        return "seq_mean"

    def per_row(self, batch):
        """[r, 1], the advantage that all tokens of a completion share; 0 for an empty one."""
        inf = float("inf")
        high = batch.advantages.masked_fill(~batch.mask, -inf).amax(1, keepdim=True)
        low = batch.advantages.masked_fill(~batch.mask, inf).amin(1, keepdim=True)
        if bool((high > low).any()):
            raise UserError(
                f"{self.name} weighs a whole completion by one advantage, and here those of its tokens differ\n"
                "use algo=gspo_token or another surrogate of tokens, or drop the plugin that sets advantages per token"
            )
        return high.masked_fill(high == -inf, 0)
