"""The tiny policy's warm start: supervised training on worked solutions of the task, and what is left to learn.

    loss = - mean of log p(token | before) over solution tokens and the end token       see Recipe

A task that can be careless teaches a habit along with the work: most of its solutions forget what is carried, so the
policy learns both ways, and takes the careless one more often. As soon as `target` of the sampled answers to held-out
problems are right the learning rate falls to zero, and training ends: reinforcement learning then finds rewards, and
still has something to teach. The result depends on the task, the shape and the recipe alone, bit for bit on one machine,
and lies under a hash of them: in `assets/` for the default task, else in the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpozoo.errors import UserError
from grpozoo.models.files import restore, save
from grpozoo.models.text import decode, encode
from grpozoo.models.tiny import POSITIONS, tiny_model, tiny_tokenizer
from grpozoo.storage import made_once
from grpozoo.types import Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from grpozoo.tasks import Task

ASSETS = Path(__file__).resolve().parent / "assets"
HARDLY = 0.05  # sampled accuracy below which a warm start is no good start
WEIGHTS = "model.safetensors"
SHAPE = ("layers", "width", "heads")  # the keys of config.model that the weights depend on


@dataclass(frozen=True)
class Recipe:
    """What decides the weights, besides the task and the shape of the model."""

    seed: int = 0
    rows: int = 64  # solutions per step
    lr: float = 3e-3  # AdamW, between warmup and cooldown
    warmup: int = 20  # steps of linear increase
    max_steps: int = 900
    careless: float = 0.7  # share of solutions with bad habits, for tasks that have this option
    target: float = 0.3  # sampled accuracy at which the learning rate starts to fall, [0, 1]
    cooldown: int = 150  # steps of linear decrease, so that what was learnt settles
    every: int = 20  # steps between two looks at the accuracy
    probe: int = 256  # held-out problems it is measured on, the last ones: evaluation uses the first
    threads: int = 1  # sums depend on their order, and that on the number of threads


def ensure(config: Any, task: Task, recipe: Recipe | None = None) -> Path:
    """The folder with the warm-started weights: shipped, cached, or trained now with a progress bar."""
    recipe = recipe or Recipe()
    teacher = _teacher(task, recipe)
    key = _key(config, teacher, recipe)
    shipped = _shipped(key)
    if shipped:
        return shipped

    def fill(folder: Path) -> None:
        print("no warm-started weights for this task and size yet: training them, once", file=sys.stderr)
        train(config, task, folder, recipe)

    return made_once(f"tiny-{key}", fill)


def regenerate(config: Any, task: Task, recipe: Recipe | None = None) -> tuple[Path, dict[str, float], str]:
    """Train into the cache even if the weights exist: the folder, steps and accuracies, and what to know about it."""
    recipe = recipe or Recipe()
    key = _key(config, _teacher(task, recipe), recipe)
    folder = made_once(f"tiny-{key}", lambda folder: train(config, task, folder, recipe), again=True)
    shipped, note = _shipped(key), ""
    if shipped:
        same = (shipped / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        note = f"{'' if same else 'not '}bit for bit the weights that ship with grpozoo"
        note += "" if same else ": other arithmetic made those, and runs use them"
    return folder, json.loads((folder / "recipe.json").read_text())["result"], note


def train(
    config: Any, task: Task, folder: Path, recipe: Recipe | None = None, start: Path | None = None
) -> dict[str, float]:
    """Train and save weights, tokenizer and `recipe.json` into `folder`; returns steps and the accuracies reached.

    start: a folder of this function's, to go on from its weights (with other data, say); null: random weights.
    """
    import torch

    recipe = recipe or Recipe()
    teacher, tokenizer, model = _teacher(task, recipe), tiny_tokenizer(), tiny_model(config, recipe.seed)
    if start is not None:
        restore(model, start)
    with _threads(recipe.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        steps, reached = _fit(model, tokenizer, teacher, recipe)
    result = {"steps": steps, **reached}
    save(model, tokenizer, folder)
    record = {
        "key": _key(config, teacher, recipe),
        "shape": {name: getattr(config, name) for name in SHAPE},
        "recipe": asdict(recipe),
        "result": result,
        "task": _content(teacher),
    }
    if start is not None:
        record["start"] = json.loads((start / "recipe.json").read_text())  # the key does not know it: never cached
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")
    return result


def _fit(model: Any, tokenizer: Any, task: Task, recipe: Recipe) -> tuple[int, dict[str, float]]:
    """Train in place until the target is reached; the number of steps, and the accuracies then."""
    import torch
    from tqdm import tqdm

    probe = _probe(task, recipe)
    room = _room(task, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    reached: dict[str, float] = {"greedy": 0.0, "sampled": 0.0}
    cooldown = max(1, min(recipe.cooldown, recipe.max_steps - 1))
    started, tokens, step, left = time.monotonic(), 0, 0, None  # left: steps of the cooldown, once it has begun
    patience = 0.1 if sys.stderr.isatty() else 20  # seconds between two lines of the bar
    with tqdm(total=recipe.max_steps, desc="warm start", unit="step", dynamic_ncols=True, mininterval=patience) as bar:
        for step, (ids, labels) in enumerate(_batches(task, tokenizer, recipe), 1):
            share = min(1.0, step / max(recipe.warmup, 1)) * (left / cooldown if left else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * share
            loss = _loss(model, ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += int((labels >= 0).sum())
            left = None if left is None else left - 1
            if left == 0 or (left is None and step % recipe.every == 0):
                reached = accuracy(model, tokenizer, task, probe, room, recipe.seed)
            if left is None and (reached["sampled"] >= recipe.target or step >= recipe.max_steps - cooldown):
                left = cooldown
            speed = tokens / (time.monotonic() - started)
            shown = f"loss {loss.item():.3f} nats/token, held-out {reached['sampled']:.0%}, {speed:.0f} tokens/s"
            bar.set_postfix_str(shown, refresh=False)
            bar.update()
            if left == 0:
                break
    if reached["sampled"] < HARDLY:
        right = f"{reached['sampled']:.1%}"
        print(f"after the warm start only {right} of the answers are right: rewards will be rare", file=sys.stderr)
    return step, reached


def _loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens with a label; ids, labels: [rows, T] int64, padded on the right, label -100 = none."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [rows, T - 1, V]; right padding is never looked at
    return cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def _batches(task: Task, tokenizer: Any, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """`max_steps` times `rows` training prompts with their solutions, in an order that the seed shuffles."""
    import torch

    source = _examples(task, recipe.seed)
    for _ in range(recipe.max_steps):
        pairs = [_tokens(task, tokenizer, prompt) for prompt in islice(source, recipe.rows)]
        longest = max(len(prompt) + len(solution) for prompt, solution in pairs)
        ids = torch.zeros(len(pairs), longest, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, (prompt, solution) in enumerate(pairs):
            end = len(prompt) + len(solution)
            ids[row, :end] = torch.tensor(prompt + solution)
            labels[row, len(prompt) : end] = torch.tensor(solution)
        yield ids, labels


def _examples(task: Task, seed: int) -> Iterator[Prompt]:
    """Training prompts without end; a set of known size in a new order each time round."""
    rng = random.Random(seed)
    while True:
        if hasattr(task.train, "__len__"):
            for index in rng.sample(range(len(task.train)), len(task.train)):
                yield task.train[index]
        else:
            yield from task.train


def _tokens(task: Task, tokenizer: Any, prompt: Prompt) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of its solution with the end token."""

    solution = task.solution(prompt)
    if solution is None:
        raise _unteachable(task)
    question = encode(tokenizer, prompt)
    answer = encode(tokenizer, Prompt(f"solution of {prompt.id}", text=solution)) + [tokenizer.eos_token_id]
    if len(question) + len(answer) > POSITIONS:
        raise UserError(
            f"prompt {prompt.id!r} with solution has {len(question) + len(answer)} tokens, more than {POSITIONS}\n"
            "shorten the data, or use model=smollm2 or model.path"
        )
    return question, answer


def accuracy(model: Any, tokenizer: Any, task: Task, prompts: list[Prompt], room: int, seed: int) -> dict[str, float]:
    """Share of right answers of at most `room` tokens to the prompts: `greedy`, and `sampled` once at temperature 1."""
    import torch

    if not prompts:
        return {"greedy": 0.0, "sampled": 0.0}
    rows = [encode(tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    result = {}
    for name, options in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=room, **options)[:, longest:]
        texts = [decode(tokenizer, _until(row, tokenizer.eos_token_id)) for row in out.tolist()]
        result[name] = sum(_right(task, *pair) for pair in zip(prompts, texts, strict=True)) / len(prompts)
    return result


def _right(task: Task, prompt: Prompt, text: str) -> bool:
    verdict = task.verify(prompt, text)
    return text == task.solution(prompt) if verdict is None else verdict >= 1


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids


def _probe(task: Task, recipe: Recipe) -> list[Prompt]:
    heldout = task.heldout
    return [heldout[i] for i in range(max(0, len(heldout) - recipe.probe), len(heldout))]


def _room(task: Task, tokenizer: Any) -> int:
    """Tokens that an answer may take while accuracy is measured: a little more than the longest of 256 solutions."""
    return 4 + max(len(_tokens(task, tokenizer, prompt)[1]) for prompt in _sample(task))


# ---------------------------------------------------------------------------------------------------------- the key


def _key(config: Any, teacher: Task, recipe: Recipe) -> str:
    shape = {name: getattr(config, name) for name in SHAPE}
    return _digest({"task": _content(teacher), "shape": shape, "recipe": asdict(recipe)})


def _content(teacher: Task) -> dict[str, Any]:
    """What is taught: 256 pairs spread over the training set stand for all. Options that change none don't count."""
    pairs = [
        (prompt.text, prompt.messages and list(map(dict, prompt.messages)), teacher.solution(prompt))
        for prompt in _sample(teacher)
    ]
    if not pairs or any(solution is None for *_, solution in pairs):
        raise _unteachable(teacher)
    size = len(teacher.train) if hasattr(teacher.train, "__len__") else None
    return {"name": type(teacher).__name__, "training_prompts": size, "pairs": _digest(pairs)}


def _sample(task: Task, count: int = 256) -> list[Prompt]:
    if not hasattr(task.train, "__len__"):
        return list(islice(task.train, count))
    size = len(task.train)
    return [task.train[i * size // count] for i in range(count)] if size > count else list(task.train)


def _teacher(task: Task, recipe: Recipe) -> Task:
    """The same task with bad habits in a share of its worked solutions, if it has that option."""
    options = {field.name for field in dataclasses.fields(task.config)} if dataclasses.is_dataclass(task.config) else ()
    if "careless" not in options:
        return task
    return type(task)(dataclasses.replace(task.config, careless=recipe.careless))


def _unteachable(task: Task) -> UserError:
    return UserError(
        f"the task {type(task).__name__} has no worked solutions, so the tiny policy cannot be warmed up on it\n"
        "use model.warm_start=false (random weights), model=smollm2 or model.path"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _shipped(key: str) -> Path | None:
    """The folder under `assets/` that this key made."""
    for record in sorted(ASSETS.glob("*/recipe.json")):
        if json.loads(record.read_text())["key"] == key:
            return record.parent
    return None


@contextmanager
def _threads(count: int):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
