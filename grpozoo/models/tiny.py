"""The tiny policy: a decoder for laptops, with a token for each character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # what the tiny tokenizer knows, a token each
POSITIONS = 1024  # tokens of prompt and completion together that the tiny policy can hold


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each printable ASCII character and the newline, and one that ends a completion and pads."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({token: i for i, token in enumerate(("<eos>", *CHARACTERS))}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<eos>",
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A Qwen3-type decoder of `config.layers`, `.width`, `.heads` with random weights that depend on the seed alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=config.width,
        intermediate_size=3 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.width // config.heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation=config.attention,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(shape).eval()
