"""Shared pieces of the tests: tiny random models, and a tokenizer whose text is the ids themselves."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing may download weights or data in a test
os.environ.setdefault("OMP_NUM_THREADS", "2")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers side by side with two threads each slow each other tenfold

import pytest
import remembered  # noqa: F401  before grpozoo takes the functions
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from grpozoo.policy.policy import Policy
from grpozoo.sampling import Law
from grpozoo.types import Prompt, Request

STOP = 1


class Numbers:
    """A tokenizer for tests: text is ids written in decimal, id 1 ends a completion."""

    eos_token_id, bos_token_id, pad_token_id, chat_template = STOP, None, STOP, None
    all_special_ids = [STOP]

    def __call__(self, text, add_special_tokens=True, **_):
        return {"input_ids": [int(word) for word in text.split()]}

    def encode(self, text, add_special_tokens=True, **_):
        return self(text)["input_ids"]

    def decode(self, ids, skip_special_tokens=True, **_):
        return " ".join(str(int(i)) for i in ids if i != STOP)


def qwen(vocabulary=40, layers=2, width=16, heads=2, seed=0, **more):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=width // heads,
            tie_word_embeddings=True, initializer_range=0.3, eos_token_id=STOP, pad_token_id=STOP, **more,
        )
    )  # fmt: skip


def gpt2(vocabulary=40, seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3,
        eos_token_id=STOP, bos_token_id=STOP, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.fixture
def make_policy():
    """A function: model and law -> Policy."""

    def make(model=None, chunk=7, **law):
        return Policy(model or qwen(), Numbers(), Law(**law), logits_chunk=chunk)

    return make


@pytest.fixture
def requests():
    """Five prompts of different lengths, groups of different sizes."""
    texts = ["5 6 7", "8 9", "10 11 12 13 14 15 16", "3", "20 21 22 23"]
    return [
        Request(Prompt(id=f"p{i}", text=text), group_id=10 * i, sample_ids=tuple(range(2 + i)))
        for i, text in enumerate(texts)
    ]
