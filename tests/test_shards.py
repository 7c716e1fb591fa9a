"""Two processes make the update of one, for every method that uses statistics beyond a row: uneven shares on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shards
from safetensors.torch import load_file

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
LAUNCHER = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    places = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for place, launcher in zip(places, ([], LAUNCHER), strict=True):
        command = [sys.executable, *launcher, str(Path(shards.__file__)), str(place)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
    return places


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
