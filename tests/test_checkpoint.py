"""A checkpoint is complete or not there: kills, damage, leftovers, and where a run goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from test_runs import CONSENT, SMALL, difference, one_thread, train  # noqa: F401

from grpozoo import UserError
from grpozoo.cli.train import train as training_job
from grpozoo.compose.command import compose
from grpozoo.compose.settings import LATER
from grpozoo.run import state
from grpozoo.run.checkpoint import CHECKSUMS, FORMAT, Store, claim, resolve, step_of, verify
from grpozoo.update import optimizer_step

SAVER = """
import os, sys
from pathlib import Path
from grpozoo.run.checkpoint import Store

def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(os.urandom(5000))
    (folder / "state.json").write_text("{}")

while sys.stdin.readline():  # one child for each line: cheaper than an interpreter for each kill
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        store = Store(Path(sys.argv[1]), keep=2)
        step = max([int(path.name[5:13]) for path in store.checkpoints()], default=0)
        while True:
            step += 1
            store.save(step, write)
            sys.stdout.write(f"{step}\\n")
            sys.stdout.flush()
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def fill(text="weights"):
    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "a.bin").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


def silent(message):
    raise AssertionError(f"unexpected report: {message}")


def test_a_checkpoint_survives_a_kill_at_any_moment(tmp_path):
    """20 kills inside saves: the newest checkpoint always verifies and is never older than one that was confirmed."""
    generator, process = (
        random.Random(0),
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ),
    )
    leftovers, confirmed = 0, 0
    for _ in range(20):
        process.stdin.write("go\n")
        process.stdin.flush()
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("child"):
            lines.append(process.stdout.readline())
        time.sleep(generator.uniform(0.005, 0.15))
        os.kill(int(lines[-1].split()[1]), signal.SIGKILL)
        while lines[-1] != "dead\n":
            lines.append(process.stdout.readline())
        confirmed = max([confirmed, *(int(line) for line in lines if line.strip().isdigit())])
        leftovers += any(path.name.startswith(".") for path in tmp_path.iterdir())
        latest = Store(tmp_path).latest(log=silent)
        assert (step_of(latest) if latest else 0) >= confirmed
    process.stdin.close()
    process.wait()
    assert confirmed > 0 and leftovers > 0  # the kills did fall into saves
    Store(tmp_path, keep=2).save(confirmed + 5, fill())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("file", ["model/a.bin", "state.json", CHECKSUMS])
@pytest.mark.parametrize("damage", ["byte", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, file, damage):
    store, reports = Store(tmp_path), []
    store.save(1, fill())
    newest = store.save(2, fill())
    content = bytearray((newest / file).read_bytes())
    if damage == "byte":
        content[len(content) // 2] ^= 0x80
        (newest / file).write_bytes(content)
    elif damage == "truncate":
        (newest / file).write_bytes(content[:-1])
    else:
        (newest / file).unlink()
    assert store.latest(reports.append).name == "step-00000001"
    assert len(reports) == 1 and f"damaged: {file}" in reports[0]
    with pytest.raises(UserError, match=f"damaged: {file}"):
        resolve(str(newest), tmp_path, "")


def test_nothing_is_left_when_the_writer_fails(tmp_path):
    store = Store(tmp_path)
    store.save(1, fill())

    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(2, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_leftovers_of_killed_saves_are_ignored_and_removed(tmp_path):
    store = Store(tmp_path)
    store.save(1, fill())
    for name in (".partial-step-00000002", ".removed-step-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "junk").write_text("x")
    assert store.latest(silent).name == "step-00000001"
    store.save(2, fill())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_the_newest_are_kept_in_the_order_of_saving_and_damaged_ones_do_not_count(tmp_path):
    store = Store(tmp_path, keep=2)
    for step in (10, 20, 30, 15):  # went back to 10 and on to 15
        store.save(step, fill())
    assert [path.name for path in store.checkpoints()] == ["step-00000015", "step-00000030"]
    (tmp_path / "step-00000015" / "state.json").unlink()
    store.save(16, fill())
    assert [path.name for path in store.checkpoints()] == ["step-00000016", "step-00000030"]


def test_the_best_is_kept_besides_the_newest(tmp_path):
    store = Store(tmp_path, keep=1)
    for step, accuracy in ((10, 0.5), (20, 0.75), (30, 0.75), (40, None), (50, 0.5)):
        store.save(step, fill(), accuracy)
    assert [step_of(path) for path in store.checkpoints()] == [50, 30]  # of equal ones the later
    store.save(60, fill(), 0.8)
    assert [step_of(path) for path in store.checkpoints()] == [60]


def test_a_newer_format_is_refused_by_its_number(tmp_path):
    run = make_run(tmp_path / "run", "h")
    note(run / "checkpoints" / "step-00000001", format=FORMAT + 1)
    for resume in ("auto", str(run), str(run / "checkpoints" / "step-00000001")):
        with pytest.raises(UserError, match=f"format {FORMAT + 1}; this one reads 1 to {FORMAT}"):
            resolve(resume, run, "h")
    note(run / "checkpoints" / "step-00000001", format=1)
    assert resolve(str(run), run, "h")[1]


def note(checkpoint, **notes):
    """Rewrite what a checkpoint says of itself."""
    content = json.loads((checkpoint / CHECKSUMS).read_text())
    (checkpoint / CHECKSUMS).write_text(json.dumps(content | notes))


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    """They would be a whole checkpoint and push the good ones out."""

    def broken(run, cycle):
        optimizer_step(run, cycle)
        if run.step == 2:
            run.trained[0].data[0, 0] = float("nan")

    monkeypatch.setattr("grpozoo.loop.optimizer_step", broken)
    with pytest.raises(
        UserError, match=r"step 3: \S+ is not finite.*\n.*step-00000002: start a new run with a smaller lr"
    ):
        train(tmp_path / "run", "steps=5", "checkpoint.every=1", "checkpoint.keep=1")
    assert [step_of(path) for path in Store(tmp_path / "run" / "checkpoints").checkpoints()] == [2]
    assert not (tmp_path / "run" / "model").exists()


def test_a_full_disk_is_a_sentence_and_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    def full(run, folder):
        if run.step == 2:
            raise OSError(28, "No space left on device")
        return write(run, folder)

    write = state._write
    monkeypatch.setattr(state, "_write", full)
    with pytest.raises(
        UserError, match="step 2: no checkpoint could be written to .*: No space left on device\n.*resume="
    ):
        train(tmp_path / "run", "steps=2", "checkpoint.every=1")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_keeps_the_checkpoint_with_the_best_held_out_accuracy(tmp_path, monkeypatch):
    accuracy = iter([0.1, 0.9, 0.2, 0.3])
    monkeypatch.setattr("grpozoo.run.run.evaluate", lambda run: {"heldout/accuracy": next(accuracy)})
    train(tmp_path / "run", "steps=3", "eval.every=1", "checkpoint.every=1", "checkpoint.keep=1")
    assert [step_of(path) for path in Store(tmp_path / "run" / "checkpoints").checkpoints()] == [3, 1]


def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("grpozoo_plugins.grpo.Grpo.state_dict", lambda self: {"seen": object()}, raising=False)
    with pytest.raises(UserError, match=r"plugin 'grpo': state_dict\(\)\['seen'\] is of type builtins.object"):
        train(tmp_path / "run", "steps=1")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_state_that_does_not_load_names_the_plugin(tmp_path, monkeypatch):
    def load(self, state):
        raise KeyError("coef")

    train(tmp_path / "run", "steps=1")
    monkeypatch.setattr("grpozoo_plugins.grpo.Grpo.load_state_dict", load, raising=False)
    with pytest.raises(
        UserError, match=r"plugin 'grpo': load_state_dict\(\) raised KeyError\('coef'\).*\nat .*test_check"
    ):
        train(tmp_path / "run", "steps=2", f"resume={tmp_path / 'run'}")


def test_a_step_that_is_saved_again_gets_a_place_of_its_own(tmp_path):
    store = Store(tmp_path)
    store.save(7, fill("old"))
    again = store.save(7, fill("new"))
    assert (store.latest(silent) / "model" / "a.bin").read_text() == "new" and step_of(again) == 7
    assert verify(tmp_path / "step-00000007") is None


def make_run(folder, config_hash, step=1, **manifest):
    Store(folder / "checkpoints").save(step, fill())
    (folder / "manifest.json").write_text(json.dumps({"config_hash": config_hash, **manifest}))
    return folder


def test_resume_paths(tmp_path):
    old = make_run(tmp_path / "runs" / "day" / "noon", "h")
    newest = old / "checkpoints" / "step-00000001"
    new = tmp_path / "runs" / "day" / "now"
    assert resolve(None, new, "h") == (new, None)
    for path in (old, old / "checkpoints", newest):
        assert resolve(str(path), new, "h") == (old, newest)
    moved = newest.rename(tmp_path / "step-00000001")
    assert resolve(str(moved), new, "h") == (new, moved)
    with pytest.raises(UserError, match="no complete checkpoint"):
        resolve(str(old), new, "h")
    with pytest.raises(UserError, match="neither a run folder"):
        resolve(str(tmp_path), new, "h")
    with pytest.raises(UserError, match="did you mean 'noon'"):
        resolve(str(old.parent / "nooon"), new, "h")


def test_auto_takes_the_newest_unfinished_run_with_the_same_configuration(tmp_path):
    runs = tmp_path / "runs"
    new = runs / "day2" / "now"
    assert resolve("auto", new, "h") == (new, None)
    older, newer = make_run(runs / "day1" / "b", "h"), make_run(runs / "day2" / "a", "h")
    make_run(runs / "day2" / "other", "g")
    make_run(runs / "day2" / "done", "h", finished=True)
    for age, run in ((20, newer), (10, older)):  # copied in the other order; what they say of themselves counts
        moment = time.time() - age
        os.utime(run / "checkpoints" / "step-00000001" / CHECKSUMS, (moment, moment))
    assert resolve("auto", new, "h") == (newer, newer / "checkpoints" / "step-00000001")
    (newer / "checkpoints" / "step-00000001" / "state.json").write_text("[]")
    assert resolve("auto", new, "h", log=lambda message: None)[0] == older
    make_run(new, "h", step=5)
    assert resolve("auto", new, "h") == (new, new / "checkpoints" / "step-00000005")
    with pytest.raises(UserError, match="another configuration"):
        resolve("auto", new, "other hash")


def test_a_run_folder_admits_one_process(tmp_path):
    held = claim(tmp_path)
    with pytest.raises(UserError, match="still going"):
        claim(tmp_path)
    held.close()
    claim(tmp_path).close()


def former(folder, whole):
    """Rewrite the newest checkpoint of a run as it was before some parameters could be saved alone: the whole model in
    every checkpoint, shapes without names, none of the keys that came later."""
    store = Store(folder / "checkpoints")
    newest = store.latest(silent)

    def write(place):
        config = OmegaConf.load(newest / "config.yaml")
        for key in LATER:
            section, name = key.split(".")
            config[section].pop(name, None)
        OmegaConf.save(config, place / "config.yaml")
        state = torch.load(newest / "trainer.pt", weights_only=True)
        del state["frozen"]
        state["trained"] = [tuple(map(int, name.split("[")[1].strip("]").split(", "))) for name in state["trained"]]
        torch.save(state, place / "trainer.pt")
        (whole / "model").rename(place / "model")

    store.save(step_of(newest) + 1, write)


@pytest.mark.parametrize("params", ["full", "middle"])
def test_a_checkpoint_of_the_former_format_goes_on_to_the_bit(tmp_path, params):
    """`resume=FOLDER` alone, or with all options once more. The final model of a run is what its last checkpoint held."""
    options, layers = [f"params={params}", "update.mini_batches=2"], ["model.layers=3"]
    train(tmp_path / "straight", "steps=4", *options, small=[*SMALL, *layers])
    train(tmp_path / "run", "steps=2", *options, small=[*SMALL, *layers])
    former(tmp_path / "run", tmp_path / "run")
    resume = [f"resume={tmp_path / 'run'}", "steps=4", CONSENT]
    if params == "full":
        train(tmp_path / "run", *options, *resume[:2], small=[*SMALL, *layers])
    else:
        assert training_job(compose(resume), resume, str(tmp_path / "new")) == 0
    assert difference(tmp_path / "run", tmp_path / "straight") == 0
    newest = Store(tmp_path / "run" / "checkpoints").latest(silent)
    assert (newest / "model").exists() == (params == "full")  # from here on the new format
    if params == "middle":
        assert all(
            name.startswith(("model.layers.0.", "model.layers.1."))
            for name in load_file(newest / "trained.safetensors")
        )


def test_a_checkpoint_of_the_former_format_refuses_another_selection(tmp_path):
    train(tmp_path / "run", "steps=1", small=[*SMALL, "model.layers=2"])
    former(tmp_path / "run", tmp_path / "run")
    config = Store(tmp_path / "run" / "checkpoints").latest(silent) / "config.yaml"
    assert "prefix_cache" not in config.read_text()
    change = ["params=middle", "steps=2", f"resume={tmp_path / 'run'}"]
    with pytest.raises(UserError, match="another"):
        train(tmp_path / "run", *change, small=[*SMALL, "model.layers=2"])
