"""Old places of modules: what was written for the release before the move imports, unchanged, and gets the same objects."""

import importlib
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

from grpozoo.moved import MOVED
from grpozoo.testing import check_plugin

# Every module of that release that had a name of its own below grpozoo.
RELEASED = """
    answers cache checkpoint config data errors evaluate head hooks judge loop metrics models ops plugins policy prefix
    progress rng rollout run sampling scaffold score search_path settings stacking state tracking types update warm_start
"""
# Names that plugins took from modules whose old name is a folder now, or whose content was divided.
NAMES = {
    "answers": "SetReward asked scalar vector_name worth",
    "data": "load_task",
    "models": "load",
    "plugins": "activate",
    "policy": "Policy Snapshot left_pad",
    "rollout": "Record decode encode",
    "run": "Run",
    "score": "score",
    "cli.main": "compose",
    "update": "Cycle cut minibatches optimizer_step pack share",
}

# A third party's module as it was published. It is frozen: when it fails, the package is wrong, not this text.
FROZEN = '''
"""Rewards of answers found in steps, a sampler, and an advantage: everything from its old place."""

from dataclasses import dataclass, replace

import torch

from grpozoo import HOOK_VERSION, Plugin, UserError, group_equal, group_mean, hookimpl
from grpozoo.answers import SetReward, asked, scalar, vector_name, worth
from grpozoo.errors import nearest, unknown
from grpozoo.judge import LABELS, EndpointJudge, RuleJudge
from grpozoo.policy import Policy, left_pad
from grpozoo.rng import stream
from grpozoo.rollout import Record, decode, encode
from grpozoo.sampling import Choice, TokenSampler, counted_bits, counted_uniform, uniforms
from grpozoo.scaffold import asks, correct_steps, main_answer, read_chain, same, scaffolded


class Frozen(Plugin):
    hook_version = 1
    metrics = {"spread": "reward: mean absolute advantage"}

    @dataclass
    class Config:
        scale: float = 1.0

        def __post_init__(self):
            if not self.scale > 0:
                raise ValueError(f"scale is above 0, got {self.scale}")

    @hookimpl
    def advantage(self, rollouts, rewards, run):
        centred = rewards.total - group_mean(rewards.total, rollouts.group_id)
        return self.config.scale * centred.masked_fill(group_equal(rewards.total, rollouts.group_id), 0.0)

    @hookimpl
    def before_update(self, advantages):
        self.log("spread", advantages.abs().mean().item())

    @hookimpl(wrapper=True)
    def transform_rewards(self):
        rewards = yield
        return replace(rewards, total=rewards.total / 2)


class FrozenReward(Plugin):
    @dataclass
    class Config:
        weight: float = 1.0

    @hookimpl
    def reward(self, rollouts, run):
        pairs = zip(rollouts.prompts, rollouts.text, strict=True)
        return {self.name: [float(main_answer(prompt, text) == prompt.answer) for prompt, text in pairs]}


class Numbers(TokenSampler):
    def start(self, requests, seed, step, max_tokens):
        rows = [(request, sample) for request in requests for sample in request.sample_ids]
        self.u = torch.stack([torch.from_numpy(uniforms(seed, step, *row, 0, max_tokens)) for row in rows])

    def next(self, choice: Choice, rows, position):
        return choice.pick(self.u[rows, position].to(choice.warped.device))[0]


class FrozenSampler(Plugin):
    @hookimpl
    def token_sampler(self):
        return Numbers()
'''
PLUGINS = {"frozen": "Frozen", "frozen_reward": "FrozenReward", "frozen_sampler": "FrozenSampler"}
SWITCHED_ON = {"frozen_sampler": ["~plugins.iid", "+plugins.frozen_sampler={}"]}


@pytest.mark.parametrize("old, new", MOVED.items())
def test_an_old_name_is_the_module_itself(old, new):
    module = importlib.import_module(f"grpozoo.{old}")
    assert module is importlib.import_module(f"grpozoo.{new}")
    assert module.__name__ == module.__spec__.name == f"grpozoo.{new}"  # what a pickle or a traceback says


@pytest.mark.parametrize("name", RELEASED.split())
def test_every_module_of_the_release_imports_with_the_names_that_others_took_from_it(name):
    module = importlib.import_module(f"grpozoo.{name}")
    assert [taken for taken in NAMES.get(name, "").split() if not hasattr(module, taken)] == []


def test_an_old_name_imports_first_and_by_every_form_of_import():
    """In a process of its own: nothing has been imported under the new name yet."""
    code = (
        "import grpozoo.judge; from grpozoo.sampling import Choice; from grpozoo import scaffold; "
        "import grpozoo.rewards.judge, grpozoo.tasks.scaffold; "
        "assert grpozoo.judge is grpozoo.rewards.judge and scaffold is grpozoo.tasks.scaffold"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_name_that_was_never_there_imports():
    with pytest.raises(ModuleNotFoundError, match="grpozoo.judges"):
        importlib.import_module("grpozoo.judges")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The frozen module, as if its distribution were installed."""
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "frozen_plugins.py").write_text(FROZEN)
    dist = SimpleNamespace(name="frozen-plugins", version="1.0", metadata={"Name": "frozen-plugins"})
    theirs = [
        importlib.metadata.EntryPoint(name, f"frozen_plugins:{cls}", "grpozoo")._for(dist)
        for name, cls in PLUGINS.items()
    ]
    ours = list(importlib.metadata.entry_points(group="grpozoo"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(
            "grpozoo.compose.registry.entry_points",
            lambda group: [entry for entry in [*ours, *theirs] if entry.group == group],
        )
        yield importlib.import_module("frozen_plugins")
    del sys.modules["frozen_plugins"]


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_written_for_the_old_places_passes_the_conformance_kit(name, frozen):
    done = check_plugin(
        name, *SWITCHED_ON.get(name, [f"+plugins.{name}={{}}"]), skip=["yaml"]
    )  # it stands in no distribution
    assert {"composes", "options are read", "state"} <= set(done)


def test_a_class_taken_from_an_old_place_is_the_class_of_now(frozen):
    from grpozoo.rewards.answers import SetReward
    from grpozoo.sampling import TokenSampler
    from grpozoo.tasks.scaffold import main_answer

    assert frozen.SetReward is SetReward and frozen.main_answer is main_answer
    assert issubclass(frozen.Numbers, TokenSampler)
