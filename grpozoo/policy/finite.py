"""Log-probabilities that stopped being numbers: where it was seen, and why as far as the weights tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpozoo.errors import UserError
from grpozoo.models.weights import listed, not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpozoo.sampling import Law


def overflow(model: PreTrainedModel, law: Law, prompt: str, position: int) -> UserError:
    """The error for logits that are NaN or infinite where they predict token `position` (from 0) of a completion."""
    where = f"the policy's logits are NaN or infinite at token {position + 1} of a completion of prompt {prompt!r}"
    if wrong := not_finite(model):
        why = f"its weights are: {listed(wrong)}; an update overflowed: lower lr, go on from an earlier checkpoint"
    else:
        dtype = str(model.dtype).removeprefix("torch.")
        why = f"its weights are finite: they overflow {dtype} or, divided by temperature {law.temperature:g}, float32"
    return UserError(f"{where}\n{why}")
