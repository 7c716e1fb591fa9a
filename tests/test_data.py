"""Which prompts a step sees, and how a task is found: every prompt once per epoch, resumable at any point."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import grpozoo.run.prompts
from grpozoo import Prompt, UserError
from grpozoo.compose.registry import installed, load_class
from grpozoo.compose.task import check_size, load_task
from grpozoo.run.prompts import PromptStream
from grpozoo.tasks import Task

TASK_FILES = sorted((Path(__file__).parents[1] / "conf" / "task").glob("*.yaml"))


def prompts(count):
    return [Prompt(str(i), text=str(i)) for i in range(count)]


class Streamed:
    """A set without a length; counts the rows that were read."""

    def __init__(self, count):
        self.items, self.read = prompts(count), 0

    def __iter__(self):
        for item in self.items:
            self.read += 1
            yield item


def ids(batch):
    return [prompt.id for prompt in batch]


def taken(stream, sizes):
    return [name for size in sizes for name in ids(stream.take(size))]


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(grpozoo.run.prompts, "BUFFER", 5)


@pytest.mark.parametrize("make", [prompts, Streamed])
@given(count=st.integers(1, 30), sizes=st.lists(st.integers(1, 12), max_size=12), seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_prompt_comes_once_per_epoch_and_none_is_dropped(make, count, sizes, seed):
    names = taken(PromptStream(make(count), seed), sizes)
    assert len(names) == sum(sizes)
    whole = len(names) // count
    for epoch in range(whole):
        assert sorted(names[epoch * count : (epoch + 1) * count]) == sorted(map(str, range(count)))
    rest = names[whole * count :]
    assert len(set(rest)) == len(rest)


@pytest.mark.parametrize("make", [prompts, Streamed])
@given(
    count=st.integers(1, 30),
    before=st.lists(st.integers(1, 12), max_size=8),
    after=st.lists(st.integers(1, 12), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_a_resumed_stream_goes_on_with_the_prompts_that_were_due(make, count, before, after):
    straight = PromptStream(make(count), 1)
    taken(straight, before)
    state = straight.state_dict()
    resumed = PromptStream(make(count), 999)
    taken(resumed, [3])  # whatever it did before
    resumed.load_state_dict(state)
    assert taken(resumed, after) == taken(straight, after)
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("make", [prompts, Streamed])
def test_the_order_does_not_depend_on_how_it_is_taken(make):
    assert taken(PromptStream(make(17), 0), [4] * 17) == taken(PromptStream(make(17), 0), [17] * 4)


@pytest.mark.parametrize("make", [prompts, Streamed])
def test_every_epoch_and_every_seed_has_its_own_order(make):
    first = PromptStream(make(100), 0)
    orders = [tuple(taken(first, [100])) for _ in range(3)] + [tuple(taken(PromptStream(make(100), 1), [100]))]
    assert len(set(orders)) == 4
    assert tuple(map(str, range(100))) not in orders


def test_resuming_a_stream_reads_no_more_than_the_position_and_the_buffer():
    source = Streamed(1000)
    stream = PromptStream(source, 0)
    stream.load_state_dict({"seed": 0, "epoch": 7, "position": 40})
    stream.take(2)
    assert source.read == 40 + 2 + grpozoo.run.prompts.BUFFER  # epochs 0 to 6 are not read


def test_a_long_sequence_is_opened_only_where_it_is_needed():
    class Sequence(list):
        opened = 0

        def __getitem__(self, index):
            self.opened += 1
            return super().__getitem__(index)

    items = Sequence(prompts(1000))
    stream = PromptStream(items, 0)
    stream.load_state_dict({"seed": 0, "epoch": 2, "position": 900})
    stream.take(6)
    assert items.opened == 6


@pytest.mark.parametrize("make", [prompts, Streamed])
def test_an_empty_set_is_an_error_and_no_endless_loop(make):
    with pytest.raises(UserError, match="empty"):
        PromptStream(make(0), 0).take(1)


@pytest.mark.parametrize("make", [prompts, Streamed])
def test_a_set_smaller_than_one_step_is_refused_with_both_numbers(make):
    task = Task(Task.Config())
    task.train = make(7)
    check_size(task, 7)
    with pytest.raises(
        UserError, match="prompts_per_step=8, but the training set has 7 prompts\nset prompts_per_step=7"
    ):
        check_size(task, 8)


def test_the_size_of_a_stream_is_checked_without_reading_all_of_it():
    task = Task(Task.Config())
    task.train = Streamed(10**5)
    check_size(task, 8)
    assert task.train.read == 8


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "task.kind has no value: choose one of arithmetic, digit_picks, digit_sum, hf, jsonl, reasoning_gym"),
        ({"kind": "arithmetics"}, "unknown task 'arithmetics', did you mean 'arithmetic'"),
        (
            {"kind": "arithmetic", "digit": 3},
            "'arithmetic' \\(from grpozoo .*\\) has no option 'digit', did you mean 'digits'",
        ),
        ({"kind": "arithmetic", "digits": "many"}, "task.digits: .*'many'"),
        ({"kind": "arithmetic", "level": 9}, "task: level is one of"),
        ({"kind": "jsonl"}, "task.path has no value"),
        ({"kind": "jsonl", "path": "/nowhere/at/all.jsonl"}, "no such file"),
    ],
)
def test_mistakes_in_the_section_task_are_told(config, message):
    with pytest.raises(UserError, match=message):
        load_task(config)


def test_a_composed_section_loads():
    section = OmegaConf.merge(OmegaConf.load(TASK_FILES[0]), {"train": 20, "heldout": 4})
    task = load_task(section)
    assert (len(task.train), len(task.heldout)) == (20, 4)


@pytest.mark.parametrize("file", TASK_FILES, ids=lambda file: file.stem)
def test_the_yaml_lists_every_option_at_its_default(file):
    section = OmegaConf.to_container(OmegaConf.load(file))
    assert section.pop("kind") == file.stem
    schema = OmegaConf.to_container(
        OmegaConf.structured(load_class(file.stem, "grpozoo.tasks").Config), enum_to_str=True
    )
    assert section == schema
    assert set(section) == {f.name for f in fields(load_class(file.stem, "grpozoo.tasks").Config)}


def test_every_installed_task_has_a_yaml_of_its_name():
    ours = {name for name, entry in installed("grpozoo.tasks").items() if entry.value.startswith("grpozoo.")}
    assert ours == {file.stem for file in TASK_FILES}


def test_loading_a_task_does_not_import_torch(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    code = f"""
import sys
from grpozoo.run.prompts import PromptStream
from grpozoo.compose.task import load_task
PromptStream(load_task({{"kind": "arithmetic"}}).train, 0).take(3)
load_task({{"kind": "jsonl", "path": {str(tmp_path / "a.jsonl")!r}}})
assert not {{"torch", "transformers", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
