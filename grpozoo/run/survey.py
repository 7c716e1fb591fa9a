"""All prompts before the first step: one that the policy cannot read or hold is found now, not when it is drawn.

Looked at are the first `MOST` training prompts, of a streaming set those that fill its buffer, and the held-out prompts that
are evaluated. What plugins make of prompts is looked at when they are drawn.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from grpozoo.errors import UserError
from grpozoo.models.lengths import longer
from grpozoo.models.positions import positions
from grpozoo.models.text import ALPHABET, characters, contents, special_tokens
from grpozoo.run.prompts import BUFFER
from grpozoo.types import Prompt

MOST = 100_000  # training prompts
PORTION = 1000  # prompts in memory at a time


def check_prompts(run: Any) -> None:
    """Refuse what does not fit, all of it in one message; say it if data hold special tokens."""
    config, survey = run.config, Survey(run.policy, run.config)
    prompts = _known(run.task, config.eval.prompts)
    while portion := list(islice(prompts, PORTION)):
        survey.look(portion)
    if survey.foreign:
        raise survey.unreadable()
    if survey.long:
        raise survey.too_long()
    if survey.special:
        run.say(survey.notice())


def _known(task: Any, heldout: int) -> Iterator[Prompt]:
    """heldout: as many prompts are evaluated; 0 = all."""
    most = MOST if hasattr(task.train, "__len__") else BUFFER
    return chain(islice(iter(task.train), most), islice(iter(task.heldout), heldout or None))


class Survey:
    """What was found among the prompts so far."""

    def __init__(self, policy: Any, config: Any):
        self.policy, self.config = policy, config
        self.held = positions(policy.model.config)  # tokens of prompt and completion together; None: no limit
        self.room = config.max_prompt_length  # tokens that a prompt may have
        if self.held is not None:
            self.room = min(self.room, self.held - config.max_completion_length)
        self.alphabet = characters(policy.tokenizer)
        self.total = 0
        self.special: list[list[str]] = []  # special tokens of each prompt that holds some
        self.foreign: list[tuple[str, set[str]]] = []  # id, characters that the policy does not know
        self.long: list[tuple[str, int]] = []  # id, tokens

    def look(self, prompts: Sequence[Prompt]) -> None:
        """Take these prompts into account."""
        self.total += len(prompts)
        policy, legible = self.policy, []
        for prompt in prompts:
            unknown = set().union(*contents(prompt)) - self.alphabet if self.alphabet else set()
            if unknown:
                self.foreign.append((prompt.id, unknown))
                continue
            legible.append(prompt)
            if not policy.special_tokens_in_data and (names := special_tokens(policy.tokenizer, prompt)):
                self.special.append(names)
        options = (policy.chat_template, policy.special_tokens_in_data)
        self.long += [(prompt.id, n) for prompt, n in longer(policy.tokenizer, legible, self.room, *options)]

    def unreadable(self) -> UserError:
        """The error for characters that the tiny policy does not know."""
        names = sorted(set().union(*(unknown for _, unknown in self.foreign)))
        return UserError(
            f"{self._some(self.foreign)} have characters that the tiny policy does not know: "
            f"{', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}\n{ALPHABET}"
        )

    def too_long(self) -> UserError:
        """The error for prompts of too many tokens: for the user's own limit, or for the model with a completion."""
        config, longest = self.config, max(tokens for _, tokens in self.long)
        found = f"{self._some(self.long)} do not fit, the longest has {longest} tokens"
        raise_limit = longest > config.max_prompt_length
        if self.held is None or longest + config.max_completion_length <= self.held:
            return UserError(
                f"{found}: max_prompt_length is {config.max_prompt_length}\n"
                f"set max_prompt_length={longest}, or shorten or drop them"
            )
        left = self.held - longest
        ways = [f"max_completion_length={left} or less" + f" and max_prompt_length={longest}" * raise_limit] * (
            left > 0
        )
        ways += ["shorter prompts", "a model.path that holds more"]
        return UserError(
            f"{found}: with max_completion_length={config.max_completion_length} that is more than the {self.held} positions "
            f"of the model\nuse {', '.join(ways[:-1])} or {ways[-1]}"
        )

    def notice(self) -> str:
        """That data hold special tokens."""
        return (
            f"{len(self.special)} of {self.total} prompts hold special tokens of the tokenizer, such as "
            f"{self.special[0][0]!r}: they are read as text\n"
            "if the data went through a chat template beforehand: model.special_tokens_in_data=true"
        )

    def _some(self, found: list[tuple[str, Any]]) -> str:
        ids = ", ".join(repr(name) for name, _ in found[:3]) + ", ..." * (len(found) > 3)
        return f"{len(found)} of {self.total} prompts ({ids})"
