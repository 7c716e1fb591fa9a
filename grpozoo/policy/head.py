"""From hidden states to log-probabilities and entropies of the sampling law, a chunk of tokens at a time.

    logp_a = log softmax(z)_a        z = warp(W h + b)      logits under temperature and truncation; h [N, d], W [V, d]
    H      = -sum_v p_v log p_v      p = softmax(z)

Logits of a chunk exist at the same time, and once more in the backward, where they are computed again.
"""

import torch
from torch import Tensor

from grpozoo.sampling import Law


def logits_logprobs(logits: Tensor, targets: Tensor, law: Law, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """The plain form: logits [N, V] -> log-probabilities [N] and entropies [N] of the law, float32."""
    logp = law.warp(logits, targets).log_softmax(-1)
    entropies = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1) if entropy else None
    return logp.gather(-1, targets[:, None])[:, 0], entropies


def head_logprobs(
    states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, law: Law, entropy: bool, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """`logits_logprobs(states @ weight.T + bias, ...)` in chunks of tokens; logits are recomputed in the backward."""
    logprobs, entropies = _HeadLogprobs.apply(states, weight, bias, targets, law, entropy, chunk)
    return logprobs, entropies if entropy else None


class _HeadLogprobs(torch.autograd.Function):
    """With p the law and z the scaled logits:  d logp_a / dz = 1[a] - p,   dH / dz_v = -p_v (log p_v + H)."""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, law, entropy, chunk):
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.law, ctx.chunk = law, chunk
        parts = [
            logits_logprobs(torch.nn.functional.linear(h, weight, bias), t, law, entropy)
            for h, t in zip(states.split(chunk), targets.split(chunk), strict=True)
        ]
        logprobs = torch.cat([part[0] for part in parts])
        entropies = torch.cat([part[1] for part in parts]) if entropy else torch.zeros_like(logprobs)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.entropy = entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        states, weight, bias, targets = ctx.saved_tensors
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        scale = 1 / (ctx.law.temperature or 1.0)
        for start in range(0, len(states), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = ctx.law.warp(torch.nn.functional.linear(states[part], weight, bias), targets[part]).log_softmax(-1)
            p = logp.exp()
            if ctx.entropy:
                logp = logp.masked_fill_(logp == -torch.inf, 0)
                entropy = -(p * logp).sum(-1, keepdim=True)
                grad = logp.add_(entropy).mul_(p).mul_(-grad_entropies[part, None]).sub_(p * grad_logprobs[part, None])
            else:
                grad = p.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad = grad.mul_(scale).to(states.dtype)
            torch.matmul(grad, weight, out=grad_states[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, states[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_states, grad_weight, grad_bias, None, None, None, None
