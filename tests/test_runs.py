"""Whole runs through the command line: killed, stopped, resumed, evaluated, split, on several processes.

What must not change the weights changes no bit of them: the model files are compared by hash.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import processes
import pytest
import torch
from safetensors.torch import load_file

from grpozoo.cli.train import train as training_job
from grpozoo.compose.command import compose
from grpozoo.errors import UserError
from grpozoo.run.run import Run

SMALL = [
    "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "max_completion_length=10",
    "task.level=1", "task.train=400", "task.heldout=40", "prompts_per_step=4", "group_size=4", "eval.prompts=4", "eval.samples=0", "eval.every=0",
    "logger.trackers=[]", "logger.progress=false", "lr=1e-2", "reward=function", f"plugins.function.path={Path(__file__).parent / 'digits.py'}:digits",
]  # fmt: skip

CONSENT = "+" + SMALL[-1]  # what resume=FOLDER alone asks for: the run names a file of code


def command(run_dir, *overrides):
    return [sys.executable, "-m", "grpozoo", *SMALL, f"run_dir={run_dir}", *overrides]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def train(run_dir, *overrides, small=tuple(SMALL), status=0):
    """What `python -m grpozoo` does with these arguments, in this process."""
    overrides = [*small, f"run_dir={run_dir}", *overrides]
    assert training_job(composed(overrides), overrides, str(run_dir)) == status


def composed(overrides):
    """compose(overrides); what differs in the place of a run alone is composed once: a third of the time of a short run."""
    places = [override for override in overrides if override.startswith(("run_dir=", "resume="))]
    config = _composed(*(override for override in overrides if override not in places)).copy()
    for key, _, place in (override.partition("=") for override in places):
        config[key] = place
    return config


@cache
def _composed(*overrides):
    return compose(list(overrides))


@pytest.fixture(autouse=True)
def one_thread():
    """The same number of threads as the subprocesses: the last bit of a sum may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(run_dir):
    return hashlib.sha256((Path(run_dir) / "model" / "model.safetensors").read_bytes()).hexdigest()


def difference(one, two):
    a, b = (load_file(Path(folder) / "model" / "model.safetensors") for folder in (one, two))
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def metrics(run_dir):
    """metrics.jsonl without what a clock or a memory meter says."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    drop = ("seconds", "time/", "memory/", "rollout/tokens_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(drop)} for line in lines]


def test_training_moves_the_weights_and_the_reward(tmp_path):
    train(tmp_path / "a", "steps=12")
    train(tmp_path / "b", "steps=12", "lr=0")
    assert difference(tmp_path / "a", tmp_path / "b") > 1e-2
    rewards = [line["reward/total_mean"] for line in metrics(tmp_path / "a") if "reward/total_mean" in line]
    assert len(rewards) == 12 and sum(rewards[-4:]) > sum(rewards[:4])


def test_evaluation_has_no_side_effect(tmp_path):
    """Peers F1: bit-equal weights with and without."""
    train(tmp_path / "never", "steps=4")
    train(tmp_path / "often", "steps=4", "eval.every=1", "eval.samples=4", "eval.ks=[1,4]")
    assert digest(tmp_path / "never") == digest(tmp_path / "often")


def test_micro_batches_change_rounding_only(tmp_path):
    """Peers A1, A13."""
    for tokens in (1, 64, 4096):
        train(
            tmp_path / str(tokens),
            "steps=3",
            f"update.tokens_per_micro_batch={tokens}",
            "update.mini_batches=2",
            "lr=1e-3",
        )
    assert difference(tmp_path / "1", tmp_path / "4096") < 1e-6
    assert difference(tmp_path / "64", tmp_path / "4096") < 1e-6


def test_a_run_stopped_at_any_moment_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Peers E2: stopped at every single point where a run can stop, inside its cycles of three optimizer steps too."""
    overrides = ["steps=2", "update.mini_batches=3", "checkpoint.every=0"]
    train(tmp_path / "straight", *overrides)
    inside = 0
    for moment in range(9):
        folder, calls = tmp_path / str(moment), itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(Run, "stopping", lambda run, calls=calls, moment=moment: next(calls) == moment)
            train(folder, *overrides, status=128)
        (newest,) = (folder / "checkpoints").glob("step-*")
        inside += torch.load(newest / "trainer.pt", weights_only=True)["cycle"] is not None
        train(folder, *overrides, f"resume={folder}")
        assert digest(folder) == digest(tmp_path / "straight")
        assert metrics(folder) == metrics(tmp_path / "straight")
    assert inside == 8  # all but the moment between the two steps


def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        command(tmp_path / "run", "steps=100000"), env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for_work(tmp_path / "run", lambda: process.poll() is None, 0.2)
    process.send_signal(signal.SIGTERM)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert f"python -m grpozoo resume={tmp_path / 'run'} {CONSENT}" in message
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/trainer.pt"))


def wait_for_work(run_dir, alive, extra):
    """Until the process has trained (its metrics file grew) or ended, and `extra` seconds more."""
    path = run_dir / "metrics.jsonl"
    before = path.stat().st_size if path.exists() else 0
    end = time.monotonic() + 120
    while alive() and time.monotonic() < end and (path.stat().st_size if path.exists() else 0) == before:
        time.sleep(0.01)
    time.sleep(extra)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(tmp_path):
    """SIGKILL while loading, sampling, updating or saving; the next process goes on by itself."""
    overrides = ["steps=60", "update.mini_batches=2", "checkpoint.every=1", "plugins.grpo.kl_coef=0.01"]
    train(tmp_path / "straight", *overrides)
    rng, kills = random.Random(0), 0
    while kills < 20:
        process = processes.start([*SMALL, f"run_dir={tmp_path / 'killed'}", *overrides, "resume=auto"], tmp_path)
        wait_for_work(tmp_path / "killed", process.is_alive, rng.uniform(0, 0.4))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
    assert kills >= 10  # a fast machine may finish before the twentieth
    train(tmp_path / "killed", *overrides, "resume=auto")
    assert digest(tmp_path / "killed") == digest(tmp_path / "straight")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    train(tmp_path / "straight", "steps=6")
    train(tmp_path / "damaged", "steps=4", "checkpoint.every=2")
    newest = tmp_path / "damaged" / "checkpoints" / "step-00000004" / "trainer.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    train(tmp_path / "damaged", "steps=6", f"resume={tmp_path / 'damaged'}")
    message = capsys.readouterr().err
    assert "trainer.pt" in message and "step-00000004" in message
    assert digest(tmp_path / "damaged") == digest(tmp_path / "straight")


def test_resume_alone_takes_the_saved_configuration_and_another_one_is_refused(tmp_path):
    train(tmp_path / "straight", "steps=6")
    train(tmp_path / "run", "steps=3")
    resume = [f"resume={tmp_path / 'run'}", CONSENT]
    with pytest.raises(UserError, match="lr: 0.01 then, 0.5 now"):
        train(tmp_path / "run", "steps=6", "lr=0.5", resume[0])
    assert training_job(compose([*resume, "steps=6"]), [*resume, "steps=6"], str(tmp_path / "new")) == 0
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")


def test_a_copied_checkpoint_goes_on_elsewhere(tmp_path, monkeypatch):
    train(tmp_path / "straight", "steps=4")
    train(tmp_path / "run", "steps=2")
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "copy" / "step-00000002")
    resume = [f"resume={tmp_path / 'copy' / 'step-00000002'}", "++steps=4", CONSENT]
    assert training_job(compose(resume), resume, str(tmp_path / "elsewhere")) == 0
    assert digest(tmp_path / "elsewhere") == digest(tmp_path / "straight")
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    named = ["resume=step-00000002", "steps=4", CONSENT]
    assert training_job(compose(named), named, str(tmp_path / "unused")) == 0
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")


@pytest.mark.slow
def test_two_processes_resume_with_the_configuration_of_the_run(tmp_path):
    """Every process takes the saved configuration, whatever it would have found by itself."""
    train(tmp_path / "straight", "steps=4", "prompts_per_step=2")
    train(tmp_path / "run", "steps=2", "prompts_per_step=2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    arguments = [
        *launcher,
        "--rdzv_endpoint",
        "localhost:0",
        "-m",
        "grpozoo",
        f"resume={tmp_path / 'run'}",
        "steps=4",
        CONSENT,
    ]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert difference(tmp_path / "run", tmp_path / "straight") < 1e-5


@pytest.mark.slow
def test_torchrun_with_the_default_logger_ends_with_status_0(tmp_path):
    """README's own words, two steps long; the launcher reports a process that dies in its last barrier."""
    small = [item for item in SMALL if not item.startswith(("logger.trackers", "reward", "plugins.function"))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    arguments = [*launcher, "--rdzv_endpoint", "localhost:0", "-m", "grpozoo", *small, "steps=2", "run_dir=run"]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["finished"] is True
    assert list((tmp_path / "run" / "grpozoo").glob("events.out.tfevents.*"))


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    train(tmp_path / "run", "steps=1")
    before = metrics(tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        train(tmp_path / "run", "steps=1")
    assert metrics(tmp_path / "run") == before


def test_other_data_is_refused_on_resume(tmp_path):
    """Peers E4."""
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    small = [item for item in SMALL if not item.startswith("task.")]
    overrides = ["task=jsonl", f"task.path={tmp_path / 'data.jsonl'}"]
    train(tmp_path / "run", *overrides, "steps=2", small=small)
    (tmp_path / "data.jsonl").write_text("\n".join(rows[1:]))
    with pytest.raises(UserError, match="other data"):
        train(tmp_path / "run", *overrides, "steps=3", f"resume={tmp_path / 'run'}", small=small)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["plugins.grpo.std=batch", "plugins.grpo.aggregation=token_mean", "plugins.grpo.kl_coef=0.1"]]
)
def test_two_processes_make_the_update_of_one(tmp_path, more):
    """Peers A7, E6, G1, G3, G4: three prompts on two processes, uneven on purpose; same completions, same weights."""
    overrides = [
        "steps=2",
        "prompts_per_step=3",
        "update.mini_batches=2",
        "lr=1e-3",
        "logger.completions=-1",
        "eval.samples=2",
        "eval.ks=[1,2]",
        *more,
    ]
    train(tmp_path / "one", *overrides)
    processes.two([*SMALL, f"run_dir={tmp_path / 'two'}", *overrides], tmp_path)
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-6
    one, two = ((tmp_path / name / "completions.jsonl").read_text().splitlines() for name in ("one", "two"))
    assert [json.loads(line)["completion"] for line in one] == [json.loads(line)["completion"] for line in two]
    assert len({json.loads(line)["completion"] for line in one[:12]}) > 8  # siblings on both processes are distinct
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, abs=1e-5, nan_ok=True)
