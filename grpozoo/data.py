"""From the section `task` of a configuration to a task, and the order in which its prompts are seen."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpozoo.errors import UserError
from grpozoo.plugins import installed, load_class, owner, read_options
from grpozoo.rng import stream
from grpozoo.tasks import Task
from grpozoo.types import Prompt

TASKS = "grpozoo.tasks"  # entry-point group
BUFFER = 1024  # prompts of a streaming set among which the next one is drawn


def load_task(config: dict[str, Any] | DictConfig) -> Task:
    """The task `config["kind"]` with the other keys as its options; every mistake in them is a UserError."""
    options = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    kind = options.pop("kind", None)
    if kind is None:
        raise UserError(f"task.kind has no value: choose one of {', '.join(sorted(installed(TASKS)))}")
    cls = load_class(str(kind), TASKS)
    distribution = owner(str(kind), TASKS)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UserError(f"task {kind!r} (from {distribution}): {cls!r} is not a subclass of grpozoo.tasks.Task")
    parsed = read_options(str(kind), cls.Config, options, "task", distribution)
    try:
        return cls(parsed)
    except (ValueError, TypeError) as error:
        raise UserError(f"task.{kind}: {error}") from None


def check_size(task: Task, prompts_per_step: int) -> None:
    """Refuse a training set that is smaller than one step. A streaming set is read that far."""
    train = task.train
    count = len(train) if hasattr(train, "__len__") else sum(1 for _ in islice(iter(train), prompts_per_step))
    if count < prompts_per_step:
        raise UserError(
            f"prompts_per_step={prompts_per_step}, but the training set has {count} prompt{'s' * (count != 1)}\n"
            f"set prompts_per_step={max(count, 1)} or fewer, or give the task more data"
            f"{' or a smaller task.heldout' if 'heldout' in {f.name for f in fields(task.Config)} else ''}"
        )


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
