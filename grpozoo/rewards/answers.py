"""Several answers in one completion: asking for them, finding them, scoring each, and what a pool of them is worth.

A prompt comes to ask for m answers in the first of these ways that applies:

    extra["answers"] is m      its task asks for m already, and says how many
    extra["several"]           the prompt's text for several answers, with {answers} for m (a column of the data will do)
    neither                    the plugin's instruction, at the end of the text or of the last user message

An answer's components are a line of the matrix [m, d] that a reward gave (Rewards.vectors). Where no reward gives one,
the answers are what stands in numbered tags, <answer_1>...</answer_1>, each scored by all rewards as if it were a
completion of its own: the d components are the rewards of weight other than 0. Case does not matter, the first match of
a number counts, and an answer whose closing tag was cut off is missing.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpozoo.errors import UserError, unknown
from grpozoo.evaluate import best_weights
from grpozoo.hooks import Plugin, hookimpl
from grpozoo.types import Prompt, Request, Rewards, Rollouts

DRAWS = 128  # weights that coverage@k is a mean over


class SetReward(Plugin):
    """Base of methods that reward a completion for its set of answers. Options: answers, empty_score, component,
    instruction.

    instruction: null = INSTRUCTION. A subclass gives `reduce`. In evaluation the total stays the rewards' own, so that methods can be compared.
    """

    metrics = {
        "answers": "answers: found and scored in a completion, mean",
        "set_reward": "reward: of a completion's set of answers, mean; this is what is trained on",
    }
    scoring = False  # the rewards are being asked about single answers

    @abstractmethod
    def reduce(self, sets: Sequence[Tensor], target: Tensor | None, stream: Callable[[], Any]) -> list[float]:
        """The reward of each set [m >= 1, d] of one group. target: for `scalar`; stream(): numpy generator of the
        group's own."""

    @hookimpl
    def validate(self, config):
        if self.config.answers == 1:
            return f"{self.name}: with answers=1 a set has one answer, whose reward is the mean of its components"
        return None

    @hookimpl(wrapper=True)
    def prepare_prompts(self, prompts, run):
        prompts = yield
        self.check_form(prompts, run)
        return [self.ask(prompt) for prompt in prompts]

    @hookimpl(wrapper=True)
    def transform_rewards(self, rollouts, rewards, run):
        rewards = yield
        if self.scoring or set(rollouts.tag) == {"eval"}:
            return rewards
        matrices, target = self.matrices(rollouts, rewards, run)
        total = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)  # [R]; NaN: the reward had no answer
        for group in rollouts.group_id.unique().tolist():
            rows = (rollouts.group_id == group).nonzero()[:, 0].tolist()
            scored = {row: matrices[row][~matrices[row].isnan().any(1)] for row in rows}
            total[[row for row in rows if not len(matrices[row])]] = self.config.empty_score
            full = {row: M for row, M in scored.items() if len(M)}

            def stream(row=rows[0], group=group):
                return run.stream(f"{self.name}/weights", rollouts.prompts[row].id, group)

            if full:
                values = self.reduce(list(full.values()), target, stream)
                total[list(full)] = torch.tensor(values, dtype=torch.float64)
            for M in scored.values():
                self.log("answers", len(M))
        if not any(map(len, matrices)):
            run.say(
                f"{self.name}: a whole step without an answer trains nothing: this policy does not write the form that its "
                "prompts ask for, or has too few tokens for it"
            )
        known = total[~total.isnan()]
        self.log("set_reward", known.mean() if len(known) else 0.0, len(known))
        return replace(rewards, total=total)

    @hookimpl
    def evaluate(self, rollouts, rewards, run):
        m = self.config.answers
        if any(asked(prompt) != m for prompt in rollouts.prompts):
            rollouts = self.ask_again(rollouts, run)
            rewards = run.score(rollouts)
        matrices, target = self.matrices(rollouts, rewards, run)
        return {f"{self.name}/{name}": value for name, value in worth(rollouts, matrices, target, m).items()}

    def ask(self, prompt: Prompt) -> Prompt:
        """The prompt that asks for the method's number of answers."""
        return ask(prompt, self.config.answers, self.config.instruction or INSTRUCTION)

    def ask_again(self, rollouts: Rollouts, run: Any) -> Rollouts:
        """As many answers to the same prompts, m to a completion."""
        m, groups = self.config.answers, rollouts.group_id.tolist()
        first = {group: row for row, group in reversed(list(enumerate(groups)))}
        requests = [
            Request(self.ask(rollouts.prompts[first[group]]), group, tuple(range(-(-groups.count(group) // m))), "eval")
            for group in dict.fromkeys(groups)
        ]
        return run.generate(requests, temperature=run.config.eval.temperature)

    def matrices(self, rollouts: Rollouts, rewards: Rewards, run: Any) -> tuple[Sequence[Tensor], Tensor | None]:
        """Components [m_i, d] of each row's answers, NaN without a reward, and what `scalar` weighs them by."""
        name = vector_name(self.name, self.config.component, rewards)
        if name is None:
            return self.score_tagged(rollouts, rewards, run)
        beside = [other for other in rewards.components if rewards.weights[other]]
        if len(beside) > 1:
            run.say(
                f"{self.name}: the reward of the set of {name!r} is the total, {', '.join(beside)} have no part in it"
            )
        return rewards.vectors[name], None

    def score_tagged(self, rollouts: Rollouts, rewards: Rewards, run: Any) -> tuple[Sequence[Tensor], Tensor]:
        """The same from answers in tags, each scored by itself."""
        names = [name for name in rewards.components if rewards.weights[name]]
        target = torch.tensor([rewards.weights[name] for name in names], dtype=torch.float64)
        found = [(row, text) for row, whole in enumerate(rollouts.text) for text in split(whole, self.config.answers)]
        columns = torch.zeros(0, len(names), dtype=torch.float64)
        if found:
            rows, texts = zip(*found, strict=True)
            self.scoring = True
            try:
                parts = run.score(replace(rollouts.select(rows), text=texts))
            finally:
                self.scoring = False
            columns = torch.stack([parts.components[name] for name in names], 1)
        owner = torch.tensor([row for row, _ in found], dtype=torch.int64)
        return [columns[owner == row] for row in range(len(rollouts))], target

    def check_form(self, prompts: Sequence[Prompt], run: Any) -> None:
        """Say it if a task with its own form was told to ask for another number of answers."""
        other = next(
            (p.extra["answers"] for p in prompts if asked(p) != self.config.answers and "answers" in p.extra), 0
        )
        if other:
            run.say(
                f"{self.name}: the task asks for {other} answer{'s' * (other > 1)} and its prompts are rewritten to ask for "
                f"{self.config.answers}: a policy that was warmed up on them does not know that form\n"
                f"set task.answers={self.config.answers}"
            )


INSTRUCTION = "\nGive {answers} answers that differ, numbered: <answer_1>...</answer_1> to <answer_{answers}>...</answer_{answers}>."


def asked(prompt: Prompt) -> int:
    """How many answers a prompt asks for."""
    return int(prompt.extra.get("answers", 1))


def ask(prompt: Prompt, m: int, instruction: str = INSTRUCTION) -> Prompt:
    """The prompt that asks for m answers; asking twice changes nothing."""
    if asked(prompt) == m:
        return prompt
    extra = {**prompt.extra, "answers": m}
    if "several" in prompt.extra:
        return replace(prompt, text=_fill(prompt.extra["several"], m), messages=None, extra=extra)
    if asked(prompt) != 1:
        raise UserError(
            f"prompt {prompt.id!r} asks for {asked(prompt)} answers and has no extra['several'] to ask for {m}"
        )
    addition = _fill(instruction, m)
    if prompt.messages is None:
        return replace(prompt, text=(prompt.text or "") + addition, extra=extra)
    users = [i for i, message in enumerate(prompt.messages) if message["role"] == "user"]
    if not users:
        raise UserError(f"prompt {prompt.id!r} has no user message to ask for {m} answers in")
    messages = list(prompt.messages)
    messages[users[-1]] = {**messages[users[-1]], "content": messages[users[-1]]["content"] + addition}
    return replace(prompt, messages=tuple(messages), extra=extra)


def _fill(text: str, m: int) -> str:
    return text.replace("{answers}", str(m))


def split(text: str, m: int) -> list[str]:
    """The answers in numbered tags, in the order of their numbers; the whole text where one answer is asked for."""
    if m == 1:
        return [text]
    found = (re.search(rf"<answer_{i}>(.*?)</answer_{i}>", text, re.IGNORECASE | re.DOTALL) for i in range(1, m + 1))
    return [answer for match in found if match and (answer := match[1].strip())]


def vector_name(plugin: str, wanted: str | None, rewards: Rewards) -> str | None:
    """Name of the vector reward: the one that is wanted, else the only one; None if there is none."""
    if wanted is None and len(rewards.vectors) < 2:
        return next(iter(rewards.vectors), None)
    if wanted is None:
        raise UserError(f"plugins.{plugin}.component: choose one of the vector rewards {', '.join(rewards.vectors)}")
    if wanted not in rewards.vectors:
        raise unknown(f"vector reward in plugins.{plugin}.component", wanted, rewards.vectors)
    return wanted


def scalar(M: Tensor, target: Tensor | None) -> Tensor:
    """[m]: the scalar reward of each answer in M [m, d]. target: [d] weights; None: 1/d each, whatever d is."""
    return M.mean(1) if target is None else M @ target


def worth(rollouts: Rollouts, matrices: Sequence[Tensor], target: Tensor | None, m: int) -> Mapping[str, float]:
    """What a pool of answers is worth, k = 1, 2, 4, ... and all of them.

    best@k      the expected best scalar reward of k answers
    coverage@k  the same for other weights of the components: mean over DRAWS of uniform weights, the same for every pool
    diversity   L1 distance of the reward vectors of two answers, mean over pairs of those that are there

    The pool of a prompt holds m answers of each completion; one that is missing counts 0, one without a reward is left
    out. Of this pool: where a sampler couples siblings it is no estimate of k independent answers.
    """
    scalars, weighted, distances = [], [], []
    for group in rollouts.group_id.unique().tolist():
        rows = (rollouts.group_id == group).nonzero()[:, 0].tolist()
        pool = torch.cat([matrices[row] for row in rows])  # [n, d]
        pool = pool[~pool.isnan().any(1)]
        missing = sum(max(m - len(matrices[row]), 0) for row in rows)
        values = torch.cat([scalar(pool, target)[:, None], pool @ _uniform(pool.shape[1]).T], 1)  # [n, 1 + DRAWS]
        values = torch.cat([values, values.new_zeros(missing, values.shape[1])]).sort(0).values
        scalars.append(values[:, :1])
        weighted.append(values[:, 1:])
        if len(pool) > 1:
            distances.append(float(torch.pdist(pool, p=1).mean()))
    least = min((len(values) for values in scalars if len(values)), default=0)
    result = {}
    for k in sorted({2**i for i in range(least.bit_length())} | ({least} - {0})):
        for name, pools in (("best", scalars), ("coverage", weighted)):
            result[f"{name}@{k}"] = fmean(_best(values, k) for values in pools if len(values))
    return result | {"diversity": sum(distances) / len(distances) if distances else 0.0}


def _best(values: Tensor, k: int) -> float:
    """Expected largest of k of the values [n, columns], ascending in each column, mean over the columns."""
    return float((torch.tensor(best_weights(len(values), k), dtype=torch.float64) @ values).mean())


@cache
def _uniform(d: int) -> Tensor:
    """[DRAWS, d] weights, uniform on the simplex; the same ones in every run."""
    return torch.from_numpy(np.random.default_rng(0).dirichlet([1.0] * d, DRAWS))
