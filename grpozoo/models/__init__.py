"""Policies and their tokenizers: the tiny decoder, SmolLM2 from its package, and any causal language model by path.

    check(config)                   what can be refused before anything heavy is imported
    load(config, task, device)      the model in evaluation mode, and its tokenizer
    encode(tokenizer, prompt, ...)  the token ids that the model sees      decode(tokenizer, ids)  the text
    stop_ids(model, tokenizer)      every id that ends a completion
    positions(model.config)         how many tokens it holds         check_length(...)  refuses what is longer
    save(model, tokenizer, folder)  in Hugging Face format     restore(model, folder)  the same weights, in place

Dropout is switched off at load, whatever the model's config says: a policy is sampled and scored by the same law.
"""

from grpozoo.models.files import restore, save
from grpozoo.models.loading import check, load
from grpozoo.models.positions import check_length, positions
from grpozoo.models.text import decode, encode, stop_ids
from grpozoo.models.tiny import CHARACTERS, POSITIONS, tiny_model, tiny_tokenizer

__all__ = [
    "CHARACTERS",
    "POSITIONS",
    "check",
    "check_length",
    "decode",
    "encode",
    "load",
    "positions",
    "restore",
    "save",
    "stop_ids",
    "tiny_model",
    "tiny_tokenizer",
]
