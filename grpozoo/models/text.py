"""From prompts to token ids and back, as one tokenizer and its chat template see them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpozoo.errors import UserError
from grpozoo.models.template import render, try_out
from grpozoo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


BREAK = "\ufdd0\ufdd1"  # stands inside a special token of the data until it is encoded; no text holds noncharacters


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    chat_template: bool | None = None,
    special_tokens_in_data: bool = False,
) -> list[int]:
    """Token ids of a prompt: at most one begin-of-sequence token, no end token that the tokenizer appends.

    Messages go through the tokenizer's chat template, up to where the assistant speaks; `chat_template=True` makes a
    text one user message; without a template (or with False) the contents of the messages are joined by blank lines.
    A closing assistant message is gone on with. A special token that stands in the data is text unless
    `special_tokens_in_data`; those that the template writes always are control ids.
    """
    if not special_tokens_in_data:
        prompt = as_text(tokenizer, prompt)
    text = shown(tokenizer, prompt, chat_template)
    _check_characters(tokenizer, text.replace(BREAK, ""), prompt)
    bare = _pieces(tokenizer, text)
    ids = bare
    if not templated(tokenizer, prompt, chat_template):  # a template writes its own special tokens
        ids = _pieces(tokenizer, text, add_special_tokens=True)
        if ids and ids[-1] == tokenizer.eos_token_id and bare[-1:] != ids[-1:]:
            ids = ids[:-1]
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:  # in the text and from the tokenizer
        ids = ids[1:]
    if not ids:
        raise UserError(f"prompt {prompt.id!r} is empty: it has no token")
    return list(ids)


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens_in_data: bool = False) -> list[int]:
    """Token ids of a given completion, without the stop token; special tokens in it as in `encode`."""
    return _pieces(tokenizer, text if special_tokens_in_data else _broken(tokenizer, text))


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of token ids: special tokens stripped, spaces left as they are. This is what rewards see."""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a completion: those of the generation config (one or several) and the tokenizer's. May be empty."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = [listed] if listed is None or isinstance(listed, int) else listed
    return frozenset(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None)


def special_tokens(tokenizer: PreTrainedTokenizerBase, data: Prompt | str) -> list[str]:
    """The special tokens that stand in a prompt or a text as if they were words, each once."""
    pattern = _pattern(tokenizer)
    texts = [data] if isinstance(data, str) else contents(data)
    return list(dict.fromkeys(found for text in texts for found in pattern.findall(text))) if pattern else []


def contents(prompt: Prompt) -> list[str]:
    """What of a prompt is data."""
    return [prompt.text or ""] if prompt.messages is None else [str(message["content"]) for message in prompt.messages]


def templated(tokenizer: Any, prompt: Prompt, chat_template: bool | None) -> bool:
    """Whether the prompt goes through the tokenizer's chat template."""
    if chat_template and not tokenizer.chat_template:
        raise UserError("model.chat_template=true: this tokenizer has no chat template\nuse model.chat_template=null")
    wanted = prompt.messages is not None if chat_template is None else chat_template
    return bool(wanted and tokenizer.chat_template)


def try_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template: bool | None) -> None:
    """Refuse a chat template that hangs or is no template, if this prompt would go through it."""
    if templated(tokenizer, prompt, chat_template):
        try_out(tokenizer, _conversation(prompt)[0])


def _conversation(prompt: Prompt) -> tuple[list[dict[str, Any]], str]:
    """The messages that a template renders, and what the assistant has said already and goes on with."""
    *messages, last = [dict(m) for m in prompt.messages or ({"role": "user", "content": prompt.text},)]
    return (messages, last["content"]) if last["role"] == "assistant" else ([*messages, last], "")


def shown(tokenizer: Any, prompt: Prompt, chat_template: bool | None) -> str:
    """The text that the model sees."""
    if not templated(tokenizer, prompt, chat_template):
        return "\n\n".join(contents(prompt))
    messages, begun = _conversation(prompt)
    text = render(tokenizer, messages, prompt.id)
    opened = re.search(r"<[^<>\s]+>\s*$", text)  # templates of reasoning models open <think> themselves
    if opened and begun.startswith(opened[0].rstrip()):
        text = text[: opened.start()]
    return text + begun


def as_text(tokenizer: Any, prompt: Prompt) -> Prompt:
    """The prompt with its special tokens broken; the same one where there are none."""
    pattern = _pattern(tokenizer)
    if pattern is None or not any(map(pattern.search, contents(prompt))):
        return prompt
    if prompt.messages is None:
        return replace(prompt, text=_broken(tokenizer, prompt.text))
    messages = tuple({**m, "content": _broken(tokenizer, str(m["content"]))} for m in prompt.messages)
    return replace(prompt, messages=messages)


def _broken(tokenizer: Any, text: str) -> str:
    """The text with BREAK inside each special token, so that a template may do with it what it does with text."""
    pattern = _pattern(tokenizer)
    while pattern and pattern.search(text):  # again: what is left of one may be the beginning of another
        text = pattern.sub(lambda match: match[0][:1] + BREAK + match[0][1:], text)
    return text


def _pieces(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text whose special tokens in data are broken: encoded in pieces, no piece holds a whole one."""
    first, *rest = text.split(BREAK)
    ids = list(tokenizer(first, add_special_tokens=add_special_tokens)["input_ids"])
    for piece in rest:
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
    return ids


def _pattern(tokenizer: Any) -> re.Pattern | None:
    """Finds special tokens in data; None: the tokenizer has none that a text can hold."""
    return _pattern_of(tokenizer, len(tokenizer) if hasattr(tokenizer, "__len__") else 0)


@lru_cache(maxsize=16)
def _pattern_of(tokenizer: Any, size: int) -> re.Pattern | None:
    """`size` is there for the cache: tokens may have been added since. One of a single character cannot be broken."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    names = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def characters(tokenizer: Any) -> frozenset[str] | None:
    """All that a tokenizer knows, if it refuses others (the tiny policy's does); None: it can spell every byte."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or type(core.model).__name__ != "WordLevel" or tokenizer.unk_token is not None:
        return None
    return frozenset(tokenizer.get_vocab())


def _check_characters(tokenizer: Any, text: str, prompt: Prompt) -> None:
    known = characters(tokenizer)
    missing = sorted(set(text) - known) if known else []
    if missing:
        raise UserError(
            f"prompt {prompt.id!r} has {', '.join(map(repr, missing[:5]))}, which the tiny policy does not know\n{ALPHABET}"
        )


ALPHABET = "it knows printable ASCII and the newline: change the data, or use model=smollm2 or model.path"
