"""The record of a run: exact files after a resume, warnings, the line on the screen, and what explains it."""

import json
import math
import subprocess
import sys
from io import StringIO
from math import inf, nan

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import LoggerType, ProjectConfiguration

from grpozoo import Plugin, Prompt, Rewards, Rollouts, UserError
from grpozoo.cli import explain
from grpozoo.config import Config, Logger
from grpozoo.metrics import METRICS, WINDOW, add, dead_groups, describe, diagnose, means
from grpozoo.run.progress import Progress, final_table
from grpozoo.run.tracking import TRACKERS, Tracker, check_trackers, read_lines, settings, summarize

CHAT = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"})


def config(steps=10, completions=3, trackers=(), progress=False):
    logger = Logger(trackers=list(trackers), completions=completions, progress=progress)
    return Config(steps=steps, logger=logger, task={"kind": "arithmetic"}, plugins={"grpo": {"clip": 0.2}})


def step_rows():
    """Two groups of two, rows shuffled; completions of 1, 2, 3 and 2 tokens."""
    prompts = Prompt("p0", "1+1=", answer="2"), Prompt("p1", messages=CHAT, answer="2")
    mask = torch.arange(3) < torch.tensor([[1], [2], [3], [2]])
    rollouts = Rollouts(
        prompts=(prompts[1], prompts[0], prompts[0], prompts[1]),
        group_id=torch.tensor([7, 3, 3, 7]),
        sample_id=torch.tensor([1, 1, 0, 0]),
        prompt_ids=((1,),) * 4,
        completion_ids=torch.ones(4, 3, dtype=torch.int64),
        completion_mask=mask,
        logprobs=torch.zeros(4, 3),
        finish_reason=("stop", "stop", "length", "stop"),
        text=("a\u2028b", "2", "\ud800", "zwei\n"),
        tag=("train",) * 4,
        policy=("policy",) * 4,
    )
    total = torch.tensor([0.0, 1.0, nan, 1.0], dtype=torch.float64)
    advantages = torch.tensor([[2.0, 9, 9], [1, 3, 9], [0, 0, 0], [-1, -1, 9]])
    return rollouts, Rewards({"answer": total}, {"answer": 1.0}, total=total), advantages


def test_metrics_are_one_strict_json_object_per_step(tmp_path):
    tracker = Tracker(tmp_path, config())
    values = {"reward/total_mean": torch.tensor(0.5), "update/lr": 0.1, "update/loss": nan, "update/grad_norm": inf}
    tracker.log(1, values)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    content = json.loads(line, parse_constant=pytest.fail)
    assert content.pop("seconds") >= 0
    expected = {"step": 1, "reward/total_mean": 0.5, "update/lr": 0.1, "update/loss": None, "update/grad_norm": None}
    assert content == expected


def test_completions_have_all_columns_and_siblings_stand_together(tmp_path):
    tracker = Tracker(tmp_path, config(completions=3))
    tracker.completions(4, *step_rows())
    lines = read_lines(tmp_path / "completions.jsonl")
    assert [(line["group_id"], line["sample_id"]) for line in lines] == [(3, 0), (3, 1), (7, 0)]
    assert lines[0]["total"] is None and lines[0]["completion"] == "\ud800" and lines[0]["finish_reason"] == "length"
    assert lines[1] == {
        "step": 4, "group_id": 3, "sample_id": 1, "prompt_id": "p0", "prompt": "1+1=", "completion": "2", "answer": "2",
        "rewards": {"answer": 1.0}, "total": 1.0, "advantage": 2.0, "length": 2, "finish_reason": "stop",
        "tag": "train", "policy": "policy",
    }  # fmt: skip
    assert lines[2]["prompt"] == "system: Add.\nuser: 1+1?" and lines[2]["advantage"] == -1.0


@pytest.mark.parametrize(("limit", "rows"), [(0, 0), (1, 1), (-1, 4)])
def test_the_limit_of_completions(tmp_path, limit, rows):
    Tracker(tmp_path, config(completions=limit)).completions(1, *step_rows())
    assert len(read_lines(tmp_path / "completions.jsonl")) == rows


def train(tracker, first, last):
    for step in range(first, last + 1):
        tracker.completions(step, *step_rows())
        tracker.log(step, {"reward/total_mean": step / 10})


def without_times(folder):
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read_lines(folder / "metrics.jsonl")]
    return lines, (folder / "completions.jsonl").read_bytes()


def test_a_killed_and_resumed_run_leaves_the_lines_of_an_uninterrupted_one(tmp_path):
    train(Tracker(tmp_path / "whole", config()), 1, 9)
    folder = tmp_path / "killed"
    killed = Tracker(folder, config())
    train(killed, 1, 4)
    position = json.loads(json.dumps(killed.position()))
    train(killed, 5, 7)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "rew')  # the crash of a machine may leave half a line
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == list(range(1, 8))
    resumed = Tracker(folder, config())
    resumed.truncate({**position, "seconds": 1000.0})
    train(resumed, 5, 9)
    assert without_times(folder) == without_times(tmp_path / "whole")
    assert read_lines(folder / "metrics.jsonl")[-1]["seconds"] >= 1000


def test_a_file_that_was_cut_below_its_checkpoint_is_reported_and_the_run_goes_on(tmp_path, capsys):
    """By a full disk or by hand, in the middle of a line: the next line is whole, and the summary is made of the rest."""
    tracker = Tracker(tmp_path, config())
    train(tracker, 1, 3)
    position = tracker.position()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    stream = StringIO()
    resumed = Tracker(tmp_path, config(progress=True), stream=stream)
    resumed.truncate(position)
    assert (
        stream.getvalue().count("lines of earlier steps are missing") == 1 and "metrics.jsonl has" in stream.getvalue()
    )
    train(resumed, 4, 4)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 4]
    assert resumed.finish()["steps"] == 3


def test_lines_that_do_not_read_are_left_out_of_the_summary(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "reward/total_mean": 0.5}\n{"st\n[1]\n\xff\n{"step": 2}\n{"step": 3'
    )
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/total_mean": 0.5}, {"step": 2}]


def test_a_position_beyond_the_file_keeps_all_and_an_empty_one_nothing(tmp_path):
    tracker = Tracker(tmp_path, config())
    train(tracker, 1, 2)
    tracker.truncate({"metrics.jsonl": 10**6, "completions.jsonl": 10**6})
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    tracker.truncate({})
    assert (tmp_path / "metrics.jsonl").stat().st_size == (tmp_path / "completions.jsonl").stat().st_size == 0


def test_other_processes_write_nothing(tmp_path):
    tracker = Tracker(tmp_path / "run", config(), is_main=False)
    train(tracker, 1, 2)
    assert tracker.finish() == {} and not (tmp_path / "run").exists()


def test_unknown_and_missing_trackers_are_refused_before_the_run(monkeypatch):
    assert set(TRACKERS) == {str(name.value) for name in LoggerType} - {"all"}
    check_trackers(["tensorboard"])
    with pytest.raises(UserError, match="'tensorbord', did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr("grpozoo.run.tracking.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb needs the package wandb.*\n.*logger=files"):
        check_trackers(["wandb"])


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def tracker():
        places = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "tensorboard"))
        accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_config=places)
        return Tracker(tmp_path, config(trackers=["tensorboard"]), accelerator)

    killed = tracker()
    train(killed, 1, 2)
    position = killed.position()
    train(killed, 3, 4)
    killed.close()
    resumed = tracker()
    resumed.truncate(position)
    train(resumed, 3, 5)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "grpozoo"))
    events.Reload()
    shown = [(event.step, round(event.value, 6)) for event in events.Scalars("reward/total_mean")]
    assert shown == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path):
    class Broken:
        def init_trackers(self, *args, **kwargs):
            raise ConnectionError("no network")

    stream = StringIO()
    tracker = Tracker(tmp_path, config(trackers=["wandb"]), Broken(), stream=stream)
    train(tracker, 1, 3)
    assert stream.getvalue().count("trackers are off") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3


def test_trackers_end_one_by_one_and_leave_the_processes_alone(tmp_path):
    """accelerate's end_training() destroys the process group: the other processes would die in their last barrier."""
    ended = []

    class Remote:
        def __init__(self, name):
            self.name = name

        def finish(self):
            ended.append(self.name)
            if self.name == "wandb":
                raise ConnectionError("no network")

    class Group:
        trackers = [Remote("wandb"), Remote("tensorboard")]

        def init_trackers(self, *args, **kwargs):
            pass

        log = init_trackers

        def end_training(self):
            raise AssertionError("the process group is gone")

    stream = StringIO()
    tracker = Tracker(tmp_path, config(trackers=["wandb", "tensorboard"]), Group(), stream=stream)
    train(tracker, 1, 2)
    tracker.close()
    assert ended == ["wandb", "tensorboard"]
    assert "tracker wandb did not finish" in stream.getvalue()


def test_settings_are_flat_and_plain():
    flat = settings(config())
    assert flat["plugins.grpo.clip"] == 0.2 and flat["optim.betas"] == "[0.9, 0.999]"


HISTORY = [
    {"step": 0, "seconds": 1.0, "heldout/accuracy": 0.25, "heldout/pass@4": 0.5},
    {"step": 1, "seconds": 2.0, "reward/total_mean": 0.2, "rollout/tokens": 300, "time/generate_s": 0.5,
     "time/step_s": 1.0, "memory/peak_mb": 700.0, "rollout/length_mean": 20.0},
    {"step": 2, "seconds": 4.5, "reward/total_mean": 0.4, "rollout/tokens": 100, "time/generate_s": 0.3,
     "time/step_s": 2.0, "memory/peak_mb": 650.0, "rollout/length_mean": 10.0,
     "heldout/accuracy": 0.75, "heldout/pass@4": 1.0},
]  # fmt: skip


def test_summary_of_a_run():
    summary = summarize(HISTORY)
    assert summary["heldout_accuracy"] == {"start": 0.25, "end": 0.75}
    assert summary["heldout"]["pass@4"] == {"start": 0.5, "end": 1.0}
    assert summary["tokens_per_second"] == pytest.approx(400 / 0.8) and summary["generated_tokens"] == 400
    assert (summary["steps"], summary["seconds"], summary["seconds_per_step"]) == (2, 4.5, 1.5)
    assert summary["peak_memory_mb"] == 700.0
    resumed = summarize([*HISTORY, {"step": 3, "rollout/tokens": 999}])  # generated before the interruption
    assert resumed["tokens_per_second"] == summary["tokens_per_second"] and resumed["generated_tokens"] == 1399
    assert summarize([])["heldout_accuracy"] == {"start": None, "end": None}


def test_finish_writes_the_summary_and_prints_the_table(tmp_path, capsys):
    tracker = Tracker(tmp_path, config(steps=2, progress=True), stream=StringIO())
    for line in HISTORY:
        tracker.log(line["step"], {name: line[name] for name in line if name not in ("step", "seconds")})
    tracker.finish(model_dir=tmp_path / "model", seed=3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["heldout_accuracy"] == {"start": 0.25, "end": 0.75} and summary["seed"] == 3
    table = capsys.readouterr().out
    assert "held-out accuracy  25.0% -> 75.0%  (+50.0 points)" in table
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path / "model"}")' in table
    columns = {line.index(text) for line, text in zip(table.splitlines(), ["25.0%", "50.0%", "0.300"], strict=False)}
    assert len(columns) == 1  # aligned


def test_the_table_of_a_run_without_figures_has_no_empty_rows():
    assert final_table(summarize([]), "runs/x") == "time        0.0 s for 0 steps\nrun folder  runs/x"


def test_plain_lines_come_every_twentieth_of_the_run_and_with_each_evaluation():
    stream = StringIO()
    progress = Progress(100, stream=stream)
    for step in range(1, 101):
        progress.update(step, {"reward/total_mean": 0.5} | ({"heldout/accuracy": 0.25} if step in (1, 7) else {}))
    lines = stream.getvalue().splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, 5, 7, *range(10, 101, 5)]
    assert lines[1].startswith("step 5/100  reward 0.500  held-out 25.0%  entropy -  length -  tokens/s -  left ")
    assert lines[-1].endswith("left 0:00")


def test_the_live_line_goes_to_a_terminal_only_and_can_be_switched_off():
    class Terminal(StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(4, stream=stream)
    for step in range(1, 5):
        progress.update(step, {"reward/total_mean": step / 4, "rollout/tokens_per_second": 1234.4})
    progress.print("a line")
    progress.close()
    text = stream.getvalue()
    assert "step 4/4" in text and "reward 1.000" in text and "tokens/s 1234" in text and "a line\n" in text
    quiet = StringIO()
    Progress(4, enabled=False, stream=quiet).update(4, {"heldout/accuracy": 1.0})
    assert quiet.getvalue() == ""


def healthy(**changes):
    line = {"reward/total_mean": 0.5, "groups/equal": 0.5, "rollout/entropy": 0.4, "rollout/truncated": 0.1}
    return line | {"reward/answer_missing": 0.0, "update/grad_norm": 1.0} | changes


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"groups/equal": 1.0, "groups/all_right": 1.0}, "equal", "harder task"),
        ({"groups/equal": 1.0, "groups/all_wrong": 1.0}, "equal", "easier task"),
        ({"groups/equal": 1.0, "groups/all_wrong": 0.5}, "equal", "graded reward"),
        ({"rollout/entropy": 0.001}, "entropy", "lower lr"),
        ({"rollout/truncated": 0.95}, "truncated", "max_completion_length"),
        ({"reward/answer_missing": 0.3}, "reward/answer_missing", "reward 'answer' gave no answer for 30%"),
        ({"reward/missing": 0.5}, "reward/missing", "rewards together"),
        ({"update/grad_norm": None}, "diverged", "not finite"),
        ({"update/max_logprob_gap": 2.0}, "gap", "float32"),
    ],
)
def test_each_scripted_failure_is_named_with_a_remedy(changes, kind, words):
    history = [healthy(**changes)] * WINDOW
    assert list(diagnose(history)) == [kind]
    assert words in next(iter(diagnose(history).values()))
    assert kind == "diverged" or not diagnose([*history, *[healthy()] * WINDOW])


def test_a_healthy_run_and_a_short_one_are_left_alone():
    assert diagnose([healthy()] * 50) == {}
    assert diagnose([healthy(**{"groups/equal": 1.0})] * (WINDOW - 1) + [healthy()]) == {}
    assert diagnose([healthy(**{"groups/equal": 1.0})] * (WINDOW - 1)) == {}


def test_evaluations_between_the_steps_do_not_hide_a_failure_and_each_warning_is_printed_once(tmp_path):
    stream = StringIO()
    tracker = Tracker(tmp_path, config(), stream=stream)
    for step in range(1, 3 * WINDOW):
        tracker.log(step, healthy(**{"groups/equal": 1.0, "groups/all_wrong": 1.0}))
        tracker.log(step, {"heldout/accuracy": 0.0})
    assert stream.getvalue().count("nothing is learnt") == 1


def test_parts_of_a_metric_are_weighted_by_their_counts():
    """3 of 4 and 3 of 12 tokens clipped: 6 of 16, and not (0.75 + 0.25) / 2."""
    sums = {}
    for part in [("grpo/clipped", 3 / 4, 4), ("grpo/clipped", 3 / 12, 12), ("grpo/clipped", math.nan, 0)]:
        add(sums, *part)
    assert means(sums) == {"grpo/clipped": 0.375}


def test_a_metric_without_weight_is_no_number():
    sums = {}
    add(sums, "grpo/none", 1.0, 0)
    assert math.isnan(means(sums)["grpo/none"])


@pytest.mark.parametrize(("size", "share"), [(2, 0.70), (4, 0.45), (8, 0.20), (16, 0.04)])
def test_expected_share_of_dead_groups(size, share):
    assert dead_groups(0.18, size) == pytest.approx(share, abs=0.006)


class Stub(Plugin):
    metrics = {"gate": "share: steps with the gate open (0.5)"}


def test_every_metric_has_a_unit_and_a_meaning():
    assert all(text.partition(": ")[2] for text in METRICS.values())
    assert describe("reward/my_fn_mean") == METRICS["reward/NAME_mean"]
    assert describe("reward/total_mean") == METRICS["reward/total_mean"]
    assert describe("heldout/pass@16") == METRICS["heldout/pass@K"]
    assert describe("stub/gate", {"stub": Stub}) == Stub.metrics["gate"]
    assert describe("heldout/pass@") is None and describe("stub/other", {"stub": Stub}) is None


def test_explain_metrics_lists_the_core_and_the_plugins():
    lines = explain.metrics({"stub": Stub}).splitlines()
    assert len(lines) == 1 + len(METRICS) + 1
    assert lines[-1].split(maxsplit=2) == ["stub/gate", "share", "steps with the gate open (0.5)"]


def test_explain_run_names_plugins_hooks_and_last_metrics(tmp_path):
    manifest = {
        "seed": 5,
        "versions": {"torch": "2.6.0"},
        "plugins": [{"name": "stub", "version": "1.2"}, {"name": "grpo", "version": "0.1"}],
        "hooks": {"policy_loss": ["stub"], "transform_rewards": ["grpo", "stub"]},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    tracker = Tracker(tmp_path, config())
    tracker.log(1, {"reward/total_mean": 0.5, "heldout/accuracy": 0.125})
    tracker.log(2, {"reward/total_mean": 0.75, "stub/gate": 1.0})
    rows = [" ".join(line.split()) for line in explain.run(tmp_path, {"stub": Stub}).splitlines()]
    assert "seed 5" in rows and "versions torch 2.6.0" in rows and "1 stub version 1.2" in rows
    assert "policy_loss one stub the first that answers wins, wrappers follow" in rows
    assert "transform_rewards chain grpo, stub each changes the result of the one before it" in rows
    assert f"reward/total_mean 0.75 2 {METRICS['reward/total_mean']}" in rows
    assert f"heldout/accuracy 0.125 1 {METRICS['heldout/accuracy']}" in rows
    assert f"stub/gate 1 2 {Stub.metrics['gate']}" in rows


def test_explain_of_a_wrong_folder_names_the_nearest(tmp_path):
    (tmp_path / "noon").mkdir()
    with pytest.raises(UserError, match="did you mean 'noon'"):
        explain.run(tmp_path / "nooon")


def test_peak_memory_is_that_of_this_process_alone():
    """A child holds 300 MB for a moment; its interpreter takes some 40, the parent's torch several hundred."""
    program = """
from grpozoo.run.tracking import peak_memory_mb
block = bytearray(300_000_000)
block[::4096] = b"x" * len(block[::4096])
del block
print(peak_memory_mb())
"""
    held = bytearray(300_000_000)
    held[::4096] = b"x" * len(held[::4096])
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 300 < float(answer.stdout) < 400
