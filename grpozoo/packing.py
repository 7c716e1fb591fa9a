"""How rows are divided: over micro-batches under a token budget, and over processes. It changes nothing beyond rounding."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from grpozoo.types import Rollouts


def tokens_per_micro_batch(update_config, model_config) -> int:
    """The token budget: as configured, or as many tokens as the estimated activation memory allows.

    Per token and layer a backward keeps about 16 vectors of the model's width and 5 of the MLP's, in float32.
    """
    if update_config.tokens_per_micro_batch:
        return update_config.tokens_per_micro_batch
    text = model_config.get_text_config()
    width = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * width
    per_token = 4 * text.num_hidden_layers * (16 * width + 5 * inner)
    return max(update_config.activation_memory_mb * 2**20 // per_token, 1)


def pack(rollouts: Rollouts, rows: list[int], budget: int, shared_prefix: bool) -> Iterator[list[int]]:
    """Rows in micro-batches of at most `budget` padded tokens (one row at least), similar lengths together.

    With `shared_prefix` completions of one prompt stay together and its tokens count once for all of them.
    """
    lengths = rollouts.lengths.tolist()
    units = defaultdict(list)
    for row in rows:
        units[rollouts.prompt_ids[row] if shared_prefix else row].append(row)
    ordered = [sorted(unit, key=lambda row: (lengths[row], row)) for unit in units.values()]
    ordered.sort(key=lambda unit: (lengths[unit[-1]], len(rollouts.prompt_ids[unit[0]]), unit[0]))

    def cost(micro: list[int]) -> int:
        prompts = {rollouts.prompt_ids[row] for row in micro}
        longest = max(map(len, prompts))
        completion = max(lengths[row] for row in micro)
        return longest * (len(prompts) if shared_prefix else len(micro)) + completion * len(micro)

    micro: list[int] = []
    for unit in ordered:
        if micro and cost(micro + unit) > budget:
            yield micro
            micro = []
        micro = micro + unit
        while len(micro) > 1 and cost(micro) > budget:  # a unit that is too large by itself
            size = next((n for n in range(len(micro) - 1, 0, -1) if cost(micro[:n]) <= budget), 1)
            yield micro[:size]
            micro = micro[size:]
    if micro:
        yield micro


def share(rollouts: Rollouts, rows: list[int], rank: int, world: int) -> list[int]:
    """The rows of process `rank`: completions of one prompt together, tokens spread evenly."""
    if world == 1:
        return rows
    lengths = rollouts.lengths.tolist()
    units = defaultdict(list)
    for row in rows:
        units[rollouts.prompt_ids[row]].append(row)
    loads, mine = [0] * world, []
    for unit in sorted(units.values(), key=lambda unit: (-sum(lengths[row] for row in unit), unit[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += sum(lengths[row] for row in unit) + len(rollouts.prompt_ids[unit[0]])
        if lightest == rank:
            mine += unit
    return sorted(mine)


def portions(
    rollouts: Rollouts, rows: list[int], budget: int, shared_prefix: bool
) -> Iterator[tuple[list[int], Rollouts]]:
    """The rows in micro-batches, as `pack` divides them: (rows, Rollouts cut to their longest completion)."""
    for micro in pack(rollouts, rows, budget, shared_prefix):
        yield micro, cut(rollouts.select(micro))


def cut(rollouts: Rollouts, device: torch.device | None = None) -> Rollouts:
    """The same rows at the width of the longest completion (one column at least), on the device."""
    width = max(int(rollouts.lengths.max()), 1)
    names = ("completion_ids", "completion_mask", "logprobs", "old_logprobs", "ref_logprobs", "entropy")
    values = {name: getattr(rollouts, name) for name in names}
    return replace(rollouts, **{n: None if v is None else v[:, :width].to(device) for n, v in values.items()})
