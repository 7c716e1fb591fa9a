"""How many tokens, prompt and completion together, a model can hold: the positions that it has or was trained for."""

from __future__ import annotations

from typing import Any

from grpozoo.errors import UserError

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")  # in configs that tell


def positions(config: Any) -> int | None:
    """The limit that a transformers config tells: of a learned table, or what rotary embeddings were trained for and
    stretched to. None where there is no such limit (recurrent models, ALiBi)."""
    config = config.get_text_config()
    if getattr(config, "alibi", False):
        return None
    limits = [limit for name in NAMES if isinstance(limit := getattr(config, name, None), int) and limit > 0]
    return max(limits[0], _stretched(config, limits[0])) if limits else None


def _stretched(config: Any, trained: int) -> int:
    """Rotary scaling (linear, YaRN, ...) multiplies the positions of the original training by a factor."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [scaling, *(part for part in scaling.values() if isinstance(part, dict))]  # one, or one per type of layer
    return max(
        int((kind.get("original_max_position_embeddings") or trained) * (kind.get("factor") or 1)) for kind in kinds
    )


def check_length(config: Any, prompt: str, prompt_length: int, max_completion_length: int) -> None:
    """Refuse a prompt (its id and tokens) whose completion may run beyond the model's positions."""
    limit = positions(config)
    if limit is None or prompt_length + max_completion_length <= limit:
        return
    room = limit - prompt_length
    way_out = f"max_completion_length is at most {room} for this prompt" if room > 0 else "shorten or drop the prompt"
    raise UserError(
        f"prompt {prompt!r} has {prompt_length} tokens and max_completion_length is {max_completion_length}: "
        f"{prompt_length + max_completion_length} tokens, and the model holds {limit} positions\n"
        f"{way_out}, or choose a model.path whose config.json allows more"
    )
