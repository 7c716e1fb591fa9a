"""Prompts that are too long, found among many: most are let pass by what their text can have at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from grpozoo.models.text import BREAK, as_text, encode, shown, templated
from grpozoo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AROUND = 16  # tokens that a tokenizer puts around a text, at most
GROWTH = 12  # bytes that a normal form makes of one, at most (NFKC makes 18 characters of U+FDFA)


def longer(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    limit: int,
    chat_template: bool | None = None,
    special_tokens_in_data: bool = False,
) -> Iterator[tuple[Prompt, int]]:
    """The prompts of more than `limit` tokens, with their number of tokens: those of `encode`."""
    texts: dict[bool, list[tuple[Prompt, str]]] = {
        True: [],
        False: [],
    }  # by whether a template wrote the special tokens
    for prompt in prompts:
        text = shown(tokenizer, prompt if special_tokens_in_data else as_text(tokenizer, prompt), chat_template)
        if not text or BREAK in text:
            ids = encode(tokenizer, prompt, chat_template, special_tokens_in_data)
            if len(ids) > limit:
                yield prompt, len(ids)
        elif most_tokens(tokenizer, text) > limit:
            texts[templated(tokenizer, prompt, chat_template)].append((prompt, text))
    for special, pairs in texts.items():
        if not pairs:
            continue
        counts = _counts(tokenizer, [text for _, text in pairs], special)
        yield from ((prompt, count) for (prompt, _), count in zip(pairs, counts, strict=True) if count > limit)


def most_tokens(tokenizer: Any, text: str) -> float:
    """What a fast tokenizer can make of a text: no token is without a byte of its own in the normalised text."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return float("inf")
    return len(text.encode("utf-8", "surrogatepass")) * (GROWTH if core.normalizer is not None else 1) + AROUND


def _counts(tokenizer: Any, texts: list[str], special: bool) -> Iterator[int]:
    """The lengths of what `encode` gives for texts, all at once. special: their special tokens stand in them already."""
    batch = tokenizer(texts, add_special_tokens=not special, return_special_tokens_mask=True, verbose=False)
    for ids, added in zip(batch["input_ids"], batch["special_tokens_mask"], strict=True):
        appended = not special and ids[-1:] == [tokenizer.eos_token_id] and added[-1]
        start = 0
        while start + 1 < len(ids) and ids[start] == ids[start + 1] == tokenizer.bos_token_id:
            start += 1
        yield len(ids) - start - bool(appended)
