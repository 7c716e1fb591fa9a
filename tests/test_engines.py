"""Every process enters the engine, also one that has no requests: servers and sharded models need all of them."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import processes
import pytest
import torch
from grpozoo_plugins import hf, native
from grpozoo_plugins.iid import Independent
from grpozoo_plugins.qmc import Qmc
from safetensors.torch import load_file
from shards import COMMON
from test_policy import sample

from grpozoo.cli.train import train
from grpozoo.compose.command import compose
from grpozoo.rollout import in_order
from grpozoo.sampling import Greedy, Law
from grpozoo.types import concatenate


@pytest.mark.parametrize("sampler", [Greedy, Independent, lambda: Qmc(Qmc.Config()).token_sampler()])
@pytest.mark.parametrize("engine", [native.Native, hf.Hf])
def test_an_engine_answers_no_requests_with_no_rows(make_policy, requests, engine, sampler):
    policy = make_policy()
    run = SimpleNamespace(config=SimpleNamespace(max_completion_length=9, max_prompt_length=99, seed=0), step=0)
    empty = engine(engine.Config()).generate(requests=[], sampler=sampler(), law=Law(), policy=policy, run=run)
    assert len(empty) == 0 and empty.completion_mask.dtype == torch.bool and empty.completion_ids.dtype == torch.int64
    whole = sample(policy, requests)
    joined = in_order(concatenate([empty, whole, empty]), requests)
    assert torch.equal(joined.completion_ids, whole.completion_ids) and torch.equal(joined.logprobs, whole.logprobs)
    assert in_order(concatenate([empty, empty]), []).text == ()


def train_one_prompt(folder: Path) -> None:
    """Two steps on one prompt each; every call of the engine leaves the number of its requests in calls-RANK.txt."""
    import os

    decode = native.decode

    def counted(requests, *arguments, **named):
        with open(folder / f"calls-{os.environ.get('RANK', '0')}.txt", "a") as file:
            file.write(f"{len(requests)}\n")
        return decode(requests, *arguments, **named)

    own = {"prompts_per_step": 1, "update.mini_batches": 1, "eval.prompts": 1, "run_dir": folder / "run"}
    shared = [word for word in COMMON if word.partition("=")[0] not in own]
    overrides = [*shared, *(f"{key}={value}" for key, value in own.items())]
    with mock.patch.object(native, "decode", counted):
        assert train(compose(overrides), overrides, str(folder / "run")) == 0


@pytest.mark.slow
def test_a_process_without_requests_enters_the_engine_as_often_as_the_others(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    processes.two([two], two, train_one_prompt)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    train_one_prompt(one)
    torch.set_num_threads(before)
    calls = [(two / f"calls-{rank}.txt").read_text().split() for rank in (0, 1)]
    assert calls[0] == (one / "calls-0.txt").read_text().split() and set(calls[0]) == {"1"}
    assert calls[1] == ["0"] * len(calls[0])
    alone, both = (load_file(folder / "run" / "model" / "model.safetensors") for folder in (one, two))
    assert max(float((alone[key] - both[key]).abs().max()) for key in alone) < 1e-6
