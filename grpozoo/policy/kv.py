"""Keys and values of prompts: padded, expanded to the completions of a prompt, with room to grow token by token."""

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpozoo.errors import UserError

GROW = 64  # tokens by which a full cache grows at least


class Preallocated(DynamicLayer):
    """A cache layer that writes into a buffer with room to grow, instead of copying itself for every token."""

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int):
        """The given rows [n] (repeats allowed) of an existing layer, with room for `room` more tokens."""
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self._length, self._buffers = layer.get_seq_length(), None
        self._resize(layer.keys, layer.values, rows, self._length + room)

    def _resize(self, keys: Tensor, values: Tensor, rows: Tensor | slice, capacity: int) -> None:
        def copy(old: Tensor) -> Tensor:
            count = len(rows) if isinstance(rows, Tensor) else len(old)
            new = old.new_empty(count, old.shape[1], capacity, old.shape[3])
            new[:, :, : self._length] = old[rows]
            return new

        self._buffers = (copy(keys), copy(values))
        self._view()

    def _view(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append in place; returns the views of everything cached."""
        end = self._length + key_states.shape[-2]
        if end > self._buffers[0].shape[2]:
            self._resize(self.keys, self.values, slice(None), end + max(GROW, end // 2))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = new
        self._length = end
        self._view()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self._resize(self.keys, self.values, indices, self._buffers[0].shape[2])


def expand(cache: DynamicCache, rows: Tensor, room: int) -> None:
    """Replace the rows of a cache by `rows` [n] of it (repeats allowed), with room for `room` more tokens."""
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [Preallocated(layer, rows, room) for layer in cache.layers]
    else:  # sliding-window and other special layers keep their own logic
        select_rows(cache, rows)


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """The rows [n] (repeats allowed) of a cache, in place and under autograd."""
    for layer in cache.layers:
        if not hasattr(layer, "batch_select_indices"):
            raise UserError(
                f"this model keeps a {type(layer).__name__}, which cannot be expanded to the completions of a prompt\n"
                "use engine=hf update.shared_prefix=false"
            )
        layer.batch_select_indices(rows)


def left_pad(prompts: list[tuple[int, ...]], device) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged ids -> ids [n, P] padded on the left, mask [n, P] bool, positions [n, P] counted from the first real id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    start = torch.tensor([width - len(prompt) for prompt in prompts], device=device)[:, None]
    positions = torch.arange(width, device=device) - start
    return ids, positions >= 0, positions.clamp(min=0)
