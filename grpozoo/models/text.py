"""From prompts to token ids and back, as one tokenizer and its chat template see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from grpozoo.errors import UserError
from grpozoo.models.template import render, try_out
from grpozoo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template: bool | None = None) -> list[int]:
    """Token ids of a prompt: at most one begin-of-sequence token, no end token that the tokenizer appends.

    Messages go through the tokenizer's chat template, up to where the assistant speaks; `chat_template=True` makes a
    text one user message; without a template (or with False) the contents of the messages are joined by blank lines.
    """
    text = _render(tokenizer, prompt, chat_template)
    _check_characters(tokenizer, text, prompt)
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = bare
    if not _templated(tokenizer, prompt, chat_template):  # a template writes its own special tokens
        ids = tokenizer(text)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id and bare[-1:] != ids[-1:]:
            ids = ids[:-1]
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:  # in the text and from the tokenizer
        ids = ids[1:]
    if not ids:
        raise UserError(f"prompt {prompt.id!r} is empty: it has no token")
    return list(ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of token ids: special tokens stripped, spaces left as they are. This is what rewards see."""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a completion: those of the generation config (one or several) and the tokenizer's. May be empty."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = [listed] if listed is None or isinstance(listed, int) else listed
    return frozenset(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None)


def _templated(tokenizer: Any, prompt: Prompt, chat_template: bool | None) -> bool:
    if chat_template and not tokenizer.chat_template:
        raise UserError("model.chat_template=true: this tokenizer has no chat template\nuse model.chat_template=null")
    wanted = prompt.messages is not None if chat_template is None else chat_template
    return bool(wanted and tokenizer.chat_template)


def try_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template: bool | None) -> None:
    """Refuse a chat template that hangs or is no template, if this prompt would go through it."""
    if _templated(tokenizer, prompt, chat_template):
        try_out(tokenizer, _messages(prompt))


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return [dict(m) for m in prompt.messages or ({"role": "user", "content": prompt.text},)]


def _render(tokenizer: Any, prompt: Prompt, chat_template: bool | None) -> str:
    if _templated(tokenizer, prompt, chat_template):
        return render(tokenizer, _messages(prompt), prompt.id)
    if prompt.messages is not None:
        return "\n\n".join(message["content"] for message in prompt.messages)
    return prompt.text or ""


def _check_characters(tokenizer: Any, text: str, prompt: Prompt) -> None:
    """The tiny policy's tokenizer refuses what it does not know; others spell every byte."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or type(core.model).__name__ != "WordLevel" or tokenizer.unk_token is not None:
        return
    missing = sorted(set(text) - set(tokenizer.get_vocab()))
    if missing:
        raise UserError(
            f"prompt {prompt.id!r} has {', '.join(map(repr, missing[:5]))}, which the tiny policy does not know\n"
            "it knows printable ASCII and the newline: change the data, or use model=smollm2 or model.path"
        )
