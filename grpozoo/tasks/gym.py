"""The generators of the package reasoning-gym, each with its own verifier (`task=reasoning_gym task.name=chain_sum`).

The completion is right as far as the generator's `score_answer` says so of its answer: what stands between the last
`answer_after` and the next `answer_before`, or the whole completion where these are null. Partial credit is passed on.

Problems are generated once and cached: some generators are slow, and some give other problems in another order.
Questions appear once; which side one is on depends on a hash of its text alone.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpozoo.errors import UserError, nearest, unknown
from grpozoo.storage import made_once
from grpozoo.tasks import Task
from grpozoo.tasks.hashing import digest, stable_hex, unit
from grpozoo.tasks.rows import check_marks, extract
from grpozoo.types import Prompt

PROBLEMS = 10**7  # of either set, all in memory
HELDOUT_SHARE = 1 / 8  # of all questions
FORMAT = 1  # of the cached file


class Gym(Task):
    """Problems of one reasoning-gym generator."""

    @dataclass
    class Config:
        name: str = MISSING  # of the generator, such as chain_sum
        options: dict[str, Any] = field(default_factory=dict)  # of the generator
        train: int = 2000  # problems
        heldout: int = 256  # problems
        seed: int = 0  # of the generator
        chat: bool = True  # prompts are chat messages; false: plain text
        system: str | None = None  # a system message, or the beginning of a plain prompt
        suffix: str = "\nGive the final answer between <answer> and </answer>."  # the end of every prompt
        answer_after: str | None = "<answer>"  # the answer follows the last of these marks
        answer_before: str | None = "</answer>"  # and stands before this one

        def __post_init__(self):
            for name, low in (("train", 1), ("heldout", 0)):
                if not low <= getattr(self, name) <= PROBLEMS:
                    raise ValueError(f"{name} lies in {low}..{PROBLEMS}, got {getattr(self, name)}")
            check_marks(self.answer_after, self.answer_before)
            if stray := {"seed", "size"} & set(self.options):
                raise ValueError(f"options.{min(stray)} is set by task.seed, task.train and task.heldout")

    def __init__(self, config: Config):
        super().__init__(config)
        self._check_name()
        entries = self._entries()
        self.train, self.heldout = ([self._prompt(entry) for entry in entries[side]] for side in ("train", "heldout"))

    def verify(self, prompt: Prompt, completion: str) -> float:
        """The generator's score of the answer, in [0, 1]; 0.0 without an answer."""
        answer = self.final_answer(completion)
        return 0.0 if answer is None else float(self._generator.score_answer(answer, prompt.extra["entry"]))

    def final_answer(self, completion: str) -> str | None:
        """The text between the markers, stripped; None: the marker is missing."""
        return extract(completion, self.config.answer_after, self.config.answer_before)

    def fingerprint(self) -> str:
        """Hash of the configuration and of the ids in order."""
        sides = (prompt.id for side in (self.train, self.heldout) for prompt in side)
        return digest([json.dumps(asdict(self.config), sort_keys=True, default=str), *sides])

    def _check_name(self) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UserError(
                "task=reasoning_gym needs the package reasoning-gym: pip install 'grpozoo[reasoning-gym]'"
            ) from None
        if self.config.name not in DATASETS:
            raise unknown("reasoning-gym generator", self.config.name, DATASETS)
        names = [f.name for f in fields(DATASETS[self.config.name][1]) if f.name not in ("seed", "size")]
        for option in self.config.options:
            if option not in names:
                raise UserError(
                    f"task.options: {self.config.name} has no option {option!r}{nearest(option, names)}\n"
                    f"options: {', '.join(names)}"
                )

    @cached_property
    def _generator(self) -> Any:
        from reasoning_gym import create_dataset

        config = self.config
        try:
            return create_dataset(config.name, size=self._limit, seed=config.seed, **config.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"task.options: {config.name} refuses {config.options}: {error}") from None

    @property
    def _limit(self) -> int:
        """Problems to generate before the generator is said to repeat itself."""
        return 1000 + 4 * int(max(self.config.train / (1 - HELDOUT_SHARE), self.config.heldout / HELDOUT_SHARE))

    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        """{"train": problems, "heldout": problems} as the generator made them, from the cache if they are there."""
        config = self.config
        key = json.dumps([config.options, config.train, config.heldout, config.seed], sort_keys=True, default=str)
        name = f"reasoning_gym/{config.name}-{stable_hex(FORMAT, version('reasoning-gym'), HELDOUT_SHARE, key)}"
        folder = made_once(name, lambda folder: _write(folder, self._generate()))
        return _plain(json.loads((folder / "problems.json").read_text(encoding="utf-8")))

    def _generate(self) -> dict[str, list[dict[str, Any]]]:
        from tqdm import tqdm

        sides: tuple[list, list] = ([], [])
        sizes, seen = (self.config.train, self.config.heldout), set()
        with tqdm(total=sum(sizes), desc=f"{self.config.name} problems", delay=2) as bar:
            for entry in self._problems():
                question = entry["question"]
                side = int(unit("side", question) < HELDOUT_SHARE)
                if question not in seen and len(sides[side]) < sizes[side]:
                    seen.add(question)
                    sides[side].append(entry)
                    bar.update()
                if all(len(side) == size for side, size in zip(sides, sizes, strict=True)):
                    return {"train": sides[0], "heldout": sides[1]}
        raise UserError(
            f"{self.config.name} gave {len(sides[0])} training and {len(sides[1])} held-out problems that differ, "
            f"not {sizes[0]} and {sizes[1]}\n"
            f"set task.train and task.heldout to at most these, or make task.options richer"
        )

    def _problems(self) -> Iterator[dict[str, Any]]:
        return (self._generator[index] for index in range(min(self._limit, len(self._generator))))

    def _prompt(self, entry: dict[str, Any]) -> Prompt:
        config, answer = self.config, entry["answer"]
        question = entry["question"] + config.suffix
        system = ({"role": "system", "content": config.system},) if config.system else ()
        shown = (
            {"messages": (*system, {"role": "user", "content": question})}
            if config.chat
            else {"text": f"{config.system or ''}{question}"}
        )
        answer = None if answer is None else str(answer)
        return Prompt(stable_hex(config.name, entry["question"]), answer=answer, extra={"entry": entry}, **shown)


def _write(folder: Path, entries: Any) -> None:
    (folder / "problems.json").write_text(json.dumps(_tagged(entries)), encoding="utf-8")


def _tagged(value: Any) -> Any:
    """JSON that remembers tuples, sets and keys that are not strings: verifiers compare with them."""
    if isinstance(value, (tuple, set, frozenset)):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {"\0" + kind: [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {"\0dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if isinstance(value, dict):
        return {key: _tagged(item) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value  # numpy's scalars


def _plain(value: Any) -> Any:
    """The inverse of `_tagged`."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "\0tuple" in value:
        return tuple(map(_plain, value["\0tuple"]))
    if "\0set" in value:
        return set(map(_plain, value["\0set"]))
    if "\0dict" in value:
        return {_plain(key): _plain(item) for key, item in value["\0dict"]}
    return {key: _plain(item) for key, item in value.items()}
