"""States of the frozen blocks below the first trained one: computed once for a batch of rollouts, reused in every pass.

    h_l(tokens)       what enters block l: it depends on the tokens and on frozen weights alone
    suffix(h_l)       blocks l, l + 1, ..., norm and head: what changes from update to update

The model's own forward runs both parts, with the blocks of the other part replaced for the call: blocks above the cut
hand on what they get, blocks below it answer h_l. Masks, positions and rotary angles stay the model's business.

Which rows are computed together is planned from the batch alone, and a part of the plan is computed when one of its
rows is first asked for: a run that resumes inside a batch, or another process, finds the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from grpozoo.types import Rollouts


class Prefix:
    """States of the rows of a batch. `compute` makes those of some rows: Rollouts -> a pair of tensors for each row."""

    def __init__(self, rollouts: Rollouts, parts: list[list[int]], compute: Callable[[Rollouts], list]):
        self.rollouts, self.parts, self.compute = rollouts, parts, compute
        self.keys = keys(rollouts)
        self.place: dict[tuple, tuple[int, int]] = {}  # a row's tokens -> (part, position in it); the first wins
        for number, part in enumerate(parts):
            for position, row in enumerate(part):
                self.place.setdefault(self.keys[row], (number, position))
        self.done: dict[int, list] = {}  # part -> its pairs

    def of(self, rollouts: Rollouts) -> list[tuple[Tensor, Tensor]] | None:
        """(states of the prompt [P, d], of the completion without its last token [n - 1, d]) of each row; None if one
        of the rows is not of this batch."""
        places = [self.place.get(key) for key in keys(rollouts)]
        if any(place is None for place in places):
            return None
        return [self._part(number)[position] for number, position in places]

    def _part(self, number: int) -> list:
        if number not in self.done:
            with torch.no_grad():
                self.done[number] = self.compute(self.rollouts.select(self.parts[number]))
        return self.done[number]

    @property
    def bytes(self) -> int:
        """Memory of the states that are there."""
        storages = {
            state.untyped_storage().data_ptr(): state.untyped_storage().nbytes()
            for pairs in self.done.values()
            for pair in pairs
            for state in pair
        }
        return sum(storages.values())


def keys(rollouts: Rollouts) -> list[tuple]:
    """What the states of a row depend on: its tokens."""
    ids, lengths = rollouts.completion_ids.cpu().numpy(), rollouts.lengths.tolist()
    return [(prompt, ids[row, : lengths[row]].tobytes()) for row, prompt in enumerate(rollouts.prompt_ids)]


def blocks_of(backbone) -> list:
    """The decoder's blocks, first to last; empty where this is not known."""
    found = getattr(backbone, "layers", None)
    return list(found) if isinstance(found, torch.nn.ModuleList) else []


@contextmanager
def replaced(blocks: list, forward: Callable) -> Iterator[None]:
    """While it lasts, each of the blocks answers forward(number, states, **arguments)."""
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(_restore, block, vars(block).get("forward"))
            block.forward = partial(_call, forward, number)
        yield


def _call(forward: Callable, number: int, *rest, **named):
    states = rest[0] if rest else named.pop("hidden_states")
    return forward(number, states, **named)


def _restore(block, forward) -> None:
    if forward is None:
        del block.forward
    else:
        block.forward = forward


@contextmanager
def ending(blocks: list, start: int) -> Iterator[list[Tensor]]:
    """Blocks from `start` on do nothing; what would enter them is appended to the list."""
    seen: list[Tensor] = []
    handle = blocks[start - 1].register_forward_hook(lambda module, arguments, answer: seen.append(answer))
    try:
        with replaced(blocks[start:], lambda number, states, **_: states):
            yield seen
    finally:
        handle.remove()


@contextmanager
def starting(blocks: list, start: int, states: Tensor, cache_name: str) -> Iterator[None]:
    """Blocks below `start` answer `states` [n, T, d] without computing."""

    def answer(number, _, **named):
        if (cache := named.get(cache_name)) is not None:
            # The model reads from a cache's first entries how long it is: keys of width 1 tell it.
            length = states.new_zeros(1, 1, 1, 1).expand(len(states), 1, states.shape[1], 1)
            cache.update(length, length, number)
        return states

    with replaced(blocks[:start], answer):
        yield
