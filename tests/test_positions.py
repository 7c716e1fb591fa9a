"""What a model can hold: read from its config, and refused before a token is sampled."""

import pytest
import torch
from conftest import Numbers, gpt2, qwen
from test_policy import sample
from test_rollout import plain_twin
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    Qwen2Config,
)

from grpozoo import UserError
from grpozoo.models import check_length, positions
from grpozoo.policy.policy import Policy
from grpozoo.sampling import Greedy, Law
from grpozoo.types import Prompt, Request

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("config, limit", [
    (GPT2Config(n_positions=64), 64),
    (OPTConfig(max_position_embeddings=2048), 2048),
    (LlamaConfig(max_position_embeddings=4096), 4096),
    (LlamaConfig(max_position_embeddings=4096, rope_scaling={"rope_type": "linear", "factor": 4.0}), 16384),
    (Qwen2Config(max_position_embeddings=32768, rope_scaling=YARN), 131072),  # Qwen2.5's own way to 128k
    (LlamaConfig(max_position_embeddings=131072, rope_scaling=LLAMA3), 131072),  # Llama 3.1: 8192 x 8 is less
    (Gemma3Config(text_config={"max_position_embeddings": 131072}), 131072),  # text inside, scaling per layer type
    (MptConfig(max_seq_len=2048, attn_config={"alibi": False}), 2048),
    (BloomConfig(), None), (MambaConfig(), None), (FalconConfig(alibi=True), None),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_positions_of_published_configs(config, limit):
    assert positions(config) == limit


def test_the_last_position_is_used_and_none_beyond():
    check_length(GPT2Config(n_positions=64), "p", 4, 60)
    with pytest.raises(UserError, match=r"prompt 'p' has 5 .* 65 tokens, and the model holds 64 .*\n.* at most 59 "):
        check_length(GPT2Config(n_positions=64), "p", 5, 60)
    with pytest.raises(UserError, match="shorten or drop the prompt"):
        check_length(GPT2Config(n_positions=64), "p", 64, 1)
    check_length(BloomConfig(), "p", 10**6, 10**6)


@pytest.mark.parametrize("engine", [sample, lambda p, r, n: plain_twin(p, r, Greedy(), p.law, n)])
@pytest.mark.parametrize("build", [gpt2, lambda: qwen(max_position_embeddings=64)])
def test_engines_refuse_a_completion_beyond_the_positions_before_the_first_token(engine, build, monkeypatch):
    policy = Policy(build(), Numbers(), Law())
    requests = [Request(Prompt("short", text="3"), 0, (0,)), Request(Prompt("long", text="3 4 5 6"), 1, (0,))]
    with torch.no_grad():
        assert engine(policy, requests, 60).completion_ids.shape[1] <= 60
    monkeypatch.setattr(policy.model, "forward", None)  # nothing may run
    with pytest.raises(UserError, match="'long' has 4 tokens and max_completion_length is 100000"):
        engine(policy, requests, 100_000)
