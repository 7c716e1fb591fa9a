"""From the section `task` of a configuration to a task."""

from dataclasses import fields
from itertools import islice
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpozoo.calls.answers import described
from grpozoo.calls.guard import place
from grpozoo.compose.options import read_options
from grpozoo.compose.registry import installed, load_class, owner
from grpozoo.errors import UserError
from grpozoo.tasks import Task
from grpozoo.types import Prompt

TASKS = "grpozoo.tasks"  # entry-point group


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
        task = cls(parsed)
        _check_made(str(kind), task)
        return task
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"task.{kind}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"task.{kind}: {cls.__name__}() raised {error!r:.300}\nat {place(error)}") from error


def _check_made(kind: str, task: Task) -> None:
    """Both sets hold prompts, as far as the first ones tell, and have a fingerprint."""
    for side in ("train", "heldout"):
        found = getattr(task, side, None)
        expected = f"expected: {side} is a sequence of grpozoo.Prompt"
        if not hasattr(found, "__iter__"):
            raise UserError(f"task.{kind}: {side} is {described(found)}\n{expected}")
        for first in islice(iter(found), 1):
            if not isinstance(first, Prompt):
                raise UserError(f"task.{kind}: {side} holds {described(first)}\n{expected}")
    if type(task).fingerprint is Task.fingerprint:
        raise UserError(
            f"task.{kind}: {type(task).__name__} does not define fingerprint()\nexpected: a hash of its prompts"
        )


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
