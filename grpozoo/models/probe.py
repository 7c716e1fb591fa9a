"""One small pass through a loaded model: it runs, and its logits know nothing of later tokens.

    d |z_t|^2 / d e_s = 0   for all s > t        z_t logits at position t, e_s the embedding of token s

A causal mask makes this gradient exactly 0. In an encoder (BERT without is_decoder) it is not, and every log-probability
of such a policy would have seen the token that it is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpozoo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LEAK = 1e-5  # gradient to a later token over that to an earlier one; rounding of a convolution by FFT stays below


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that looks ahead. name: what messages call it."""
    past, future = _gradients(model)
    if future > LEAK * past:
        raise UserError(
            f"{name}: {type(model).__name__} is not causal: its logits depend on tokens that come later\n"
            "a policy is a causal language model (a decoder), not an encoder like BERT"
        )


def _gradients(model: PreTrainedModel) -> tuple[float, float]:
    """Largest absolute gradient of the logits in the middle of 8 tokens to the embeddings before and behind it."""
    import torch

    table = model.get_input_embeddings()
    ids = torch.arange(8, device=table.weight.device)[None] % len(table.weight)
    leaves: list[Tensor] = []

    def cut(module, arguments, embedded):
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    hook = table.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            (gradient,) = torch.autograd.grad(logits[0, 3].float().square().sum(), leaves[:1])
    finally:
        hook.remove()
    size = gradient[0].float().abs()
    return float(size[:4].max()), float(size[4:].max())
