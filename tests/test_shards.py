"""Two processes make the update of one, for every method that uses statistics beyond a row: uneven shares on purpose."""

import json

import processes
import pytest
import shards
import torch
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    shards.main(one)
    torch.set_num_threads(before)
    processes.two([two], two, shards.main, timeout=600)
    return one, two


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    drop = ("seconds", "time/", "memory/", "rollout/tokens_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(drop)} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name.strip("[]").replace(",", "-") for name in shards.CASES])
def test_two_processes_make_the_update_of_one(folders, name):
    one, two = (load_file(folder / name / "model" / "model.safetensors") for folder in folders)
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-6
    for a, b in zip(metrics(folders[0] / name), metrics(folders[1] / name), strict=True):
        assert a == pytest.approx(b, abs=1e-4, nan_ok=True)
