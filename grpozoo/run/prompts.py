"""The order in which a run sees the prompts of its task."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from grpozoo.errors import UserError
from grpozoo.rng import stream
from grpozoo.types import Prompt

BUFFER = 1024  # prompts of a streaming set among which the next one is drawn


class PromptStream:
    """Prompts without end: each once per epoch, every epoch in another order that (seed, epoch) alone decides.

    Nothing is dropped: a batch may hold the end of one epoch and the beginning of the next. The state is a position,
    so a resumed run goes on with exactly the prompts that were due. For a sequence this is immediate. A streaming set
    is shuffled through a buffer of 1024 prompts and read again from the start of the epoch: as many rows as had been
    seen, plus the buffer.
    """

    def __init__(self, prompts: Sequence[Prompt] | Iterable[Prompt], seed: int):
        self.prompts, self.seed = prompts, seed
        self.epoch, self.position = 0, 0  # prompts taken from this epoch
        self._rest: Iterator[Prompt] | None = None  # of the epoch, from the position on

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; UserError if there are none at all."""
        batch: list[Prompt] = []
        while len(batch) < count:
            if self._rest is None:
                self._rest = self._epoch(self.epoch, self.position)
            part = list(islice(self._rest, count - len(batch)))
            batch += part
            self.position += len(part)
            if len(batch) < count:
                if self.position == 0:
                    raise UserError("the training set is empty: give the task more data")
                self.epoch, self.position, self._rest = self.epoch + 1, 0, None
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken, on the same prompts (`Task.fingerprint` tells)."""
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self._rest = None

    def _epoch(self, epoch: int, start: int) -> Iterator[Prompt]:
        rng = stream(self.seed, "order", epoch)
        if hasattr(self.prompts, "__len__"):
            return (self.prompts[int(index)] for index in rng.permutation(len(self.prompts))[start:])
        return islice(_shuffled(self.prompts, rng), start, None)


def _shuffled(prompts: Iterable[Prompt], rng) -> Iterator[Prompt]:
    """Each prompt once; the next one is drawn from the `BUFFER` prompts that were read and not given out."""
    buffer: list[Prompt] = []
    for prompt in prompts:
        if len(buffer) < BUFFER:
            buffer.append(prompt)
            continue
        index = int(rng.integers(BUFFER))
        yield buffer[index]
        buffer[index] = prompt
    for index in rng.permutation(len(buffer)):
        yield buffer[int(index)]
