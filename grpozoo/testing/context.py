"""What hooks see as `run` while they are tested: a configuration, a task, streams, and a generator without a model."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import torch

from grpozoo.compose.plugins import Active
from grpozoo.config import Config
from grpozoo.packing import cut
from grpozoo.rewards.asking import collective
from grpozoo.rewards.score import score
from grpozoo.rng import key, stream
from grpozoo.tasks import Task
from grpozoo.testing.example import prompt, reply
from grpozoo.types import Request, Rewards, Rollouts


class Copy(Task):
    """Say the number that the prompt names."""

    def __init__(self, config: Any = None):
        super().__init__(config or self.Config())
        self.train, self.heldout = ([prompt(group) for group in range(start, start + 16)] for start in (0, 16))

    def verify(self, prompt, completion):
        """1 if the completion is the answer."""
        return float(completion == prompt.answer)

    def solution(self, prompt):
        """The answer."""
        return prompt.answer

    def fingerprint(self):
        """The prompts never change."""
        return "copy"


class Context:
    """A stand-in for grpozoo.run.run.Run: the same names, one process, completions made up from the request's identity."""

    rank, world = 0, 1

    def __init__(self, config: Config, active: Active, step: int = 1):
        self.config, self.active, self.step = config, active, step
        self.plugins, self.hooks, self.needs = active.plugins, active.hooks, active.needs
        self.task = Copy()
        self._policies: Mapping[str, Any] | None = None
        self._reference: Any = None
        self.taken = 0  # prompts
        self.said: list[str] = []

    @property
    def policies(self):
        """Named policies; here one, made when it is first asked for."""
        if self._policies is None:
            self._policies = {"policy": tiny_policy()}
        return self._policies

    @property
    def policy(self):
        """The policy that is trained."""
        return self.policies["policy"]

    def stream(self, purpose: str, *parts):
        """A numpy generator of one's own."""
        return stream(self.config.seed, purpose, self.step, *parts)

    @property
    def reference(self):
        """The policy that the trained one is compared with."""
        if self._reference is None:
            self._reference = tiny_policy()
        return self._reference

    @collective
    def prompts(self, count: int):
        """The next prompts of the training data, as the plugins prepare them."""
        taken = [self.task.train[(self.taken + i) % len(self.task.train)] for i in range(count)]
        self.taken += count
        return self.hooks.prepare_prompts(prompts=taken, run=self)

    def verdicts(self, rollouts: Rollouts, rewards: Rewards) -> torch.Tensor:
        """[R] float64: 1 where the first component is at least 1, else 0; NaN where it did not answer."""
        first = next(iter(rewards.components.values()))
        return (first >= 1).double().masked_fill(first.isnan(), torch.nan)

    @collective
    def measure(self, rollouts: Rollouts) -> Rollouts:
        """What is there already."""
        return rollouts

    def given(self, requests: list[Request], texts: list[str]) -> Rollouts:
        """Completions that nobody sampled: the digits of each text as token ids, and the stop id 1."""
        rows = [[2 + int(sign) for sign in text if sign.isdigit()][:3] + [1] for text in texts]
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(4) < lengths[:, None]
        ids = torch.tensor([row + [0] * (4 - len(row)) for row in rows])
        return Rollouts(
            prompts=tuple(request.prompt for request in requests),
            group_id=torch.tensor([request.group_id for request in requests]),
            sample_id=torch.tensor([request.sample_ids[0] for request in requests]),
            prompt_ids=tuple((2, 3) for _ in requests),
            completion_ids=ids,
            completion_mask=mask,
            logprobs=torch.zeros(mask.shape),
            finish_reason=("stop",) * len(rows),
            text=tuple(texts),
            tag=tuple(request.tag for request in requests),
            policy=tuple(request.policy for request in requests),
        )

    @collective
    def generate(self, requests: list[Request], temperature: float | None = None) -> Rollouts:
        """Completions of 1 to 4 tokens for the requests, in their order."""
        rows = [(request, sample) for request in requests for sample in request.sample_ids]
        numbers = [key(request.prompt.id, request.tag, sample) % 1000 for request, sample in rows]
        lengths = torch.tensor([1 + number % 4 for number in numbers])
        mask = torch.arange(4) < lengths[:, None]
        return Rollouts(
            prompts=tuple(request.prompt for request, _ in rows),
            group_id=torch.tensor([request.group_id for request, _ in rows]),
            sample_id=torch.tensor([sample for _, sample in rows]),
            prompt_ids=tuple((2, 3) for _ in rows),
            completion_ids=(2 + torch.tensor(numbers)[:, None] % 7 + torch.arange(4)) * mask,
            completion_mask=mask,
            logprobs=-0.5 * mask.float(),
            finish_reason=tuple("stop" if number % 4 < 3 else "length" for number in numbers),
            text=tuple(
                request.prompt.answer or reply(0, 1) if number % 2 else "no"
                for (request, _), number in zip(rows, numbers, strict=True)
            ),
            tag=tuple(request.tag for request, _ in rows),
            policy=tuple(request.policy for request, _ in rows),
        )

    @collective
    def score(self, rollouts: Rollouts) -> Rewards:
        """What the reward plugins answer, shaped."""
        rewards = score(self.hooks, self.plugins, rollouts, self, timeout=60.0)
        return self.hooks.transform_rewards(rollouts=rollouts, rewards=rewards, run=self)

    def say(self, text: str) -> None:
        """Remember what was said, once each."""
        if text not in self.said:
            self.said.append(text)

    def mine(self, rollouts: Rollouts, rows: list[int]):
        """All rows at once."""
        live = [row for row in rows if bool(rollouts.completion_mask[row].any())]
        if live:
            yield live, cut(rollouts.select(live))

    @collective
    def sum_gradients(self, parameters: list) -> None:
        """One process."""

    @collective
    def gather(self, parts: list) -> list:
        """One process."""
        return parts

    @collective
    def sum(self, values):
        """One process."""
        return values


class Decimal:
    """A tokenizer: text is token ids written in decimal, id 1 ends a completion."""

    eos_token_id, bos_token_id, pad_token_id, chat_template = 1, None, 1, None
    all_special_ids = [1]

    def __call__(self, text, add_special_tokens=True, **_):
        """The numbers in the text, as ids below 23."""
        return {"input_ids": [int(word) % 23 for word in text.split() if word.isdigit()] or [2]}

    def encode(self, text, add_special_tokens=True, **_):
        """The ids alone."""
        return self(text)["input_ids"]

    def decode(self, ids, skip_special_tokens=True, **_):
        """Ids, the stop id apart."""
        return " ".join(str(int(i)) for i in ids if i != 1)


def tiny_policy():
    """A random Qwen3-type policy of two layers and 23 tokens; the same weights each time, the caller's random state untouched."""
    from grpozoo.policy.policy import Policy
    from grpozoo.sampling import Law

    return Policy(deepcopy(_tiny_model()), Decimal(), Law(1.0))


@cache
def _tiny_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, tie_word_embeddings=True, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)
