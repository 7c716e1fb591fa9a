"""The composition matrix: each pair of methods trains, and both have an effect, or is refused before a model is loaded.

A pair that trains does three steps of two optimizer steps each on a random policy of one layer. Its weights are finite
and differ from those of GRPO alone and from those of each of the two methods alone: no method is dropped in silence.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from grpozoo import Plugin, Prompt, hookimpl
from grpozoo.cli.card import card, methods, presets
from grpozoo.compose import stacking
from grpozoo.compose.plugins import register
from grpozoo.compose.settings import Settings
from grpozoo.loop import train
from grpozoo.run.run import Run
from grpozoo.tasks import Task

SMALL = [
    "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "max_completion_length=6",
    "prompts_per_step=4", "group_size=3", "steps=3", "lr=3e-2", "update.mini_batches=2", "logger.trackers=[]",
    "logger.progress=false",
]  # fmt: skip
# Options under which a method acts in so short a run; at its defaults it may have nothing to do.
ACTIVE = {
    "adaptive_entropy": {"init": 0.1, "target": 99.0, "coef_max": 1.0},
    "bnpo": {"reward_min": -9.0, "reward_max": 9.0},
    "clip_cov": {"share": 0.5, "lower": -99.0, "upper": 99.0},
    "clip_higher": {"clip": 0.01, "clip_high": 0.02},
    "entropy_bonus": {"coef": 0.1},
    "entropy_mask": {"share": 0.8},
    "kl": {"coef": 0.1},
    "kl_cov": {"share": 0.5},
    "mismatch": {"level": "sequence", "mode": "truncate", "c_max": 0.9},
    "dual_clip": {"c": 1.01},
    "opsm": {"threshold": 0.0},
    "reference": {"every": 1},
    "two_sided": {"clip_high": 0.0, "delta": 1.01},
    "scope_rl": {"outcome": "right"},
    "stare": {"target_entropy": 99.0, "reweight_w": 4.0},
}


class Letters(Task):
    """A completion is right if it has an even number of lower-case letters: a random policy is right about half the time."""

    def __init__(self):
        super().__init__(self.Config())
        self.train = [Prompt(f"p{i}", text=f"{i}=", answer="0") for i in range(200)]
        self.heldout = self.train[:1]

    def verify(self, prompt, completion):
        return float(sum(sign.islower() for sign in completion) % 2 == 0)

    def solution(self, prompt):
        return "ab"

    def fingerprint(self):
        return "letters"


class Probe(Plugin):
    """Two components in [0, 1] that differ from row to row, and a reward for each of the row's two halves."""

    @hookimpl
    def reward(self, rollouts, run):
        right = [run.task.verify(p, text) for p, text in zip(rollouts.prompts, rollouts.text, strict=True)]
        sums = [sum(map(ord, text)) % 101 / 101 for text in rollouts.text]
        ends = rollouts.lengths.clamp(min=1) - 1
        halves = [
            torch.tensor([[int(end) // 2, r], [int(end), s]], dtype=torch.float64)
            for end, r, s in zip(ends, right, sums, strict=True)
        ]
        return {"right": right, "sums": sums, "halves": halves}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(choices):
    return {name: ACTIVE[name] for choice in choices for name in stacking.content(choice) if name in ACTIVE}


@cache
def trained(*choices) -> torch.Tensor:
    """All weights after three steps, as one vector."""
    from accelerate import Accelerator

    stack = stacking.stack(choices, options(choices), SMALL)
    plugins = {name: plugin for name, plugin in stack.active.plugins.items() if name != "answer"}
    probe = Probe(Probe.Config())
    probe.name = "probe"
    settings = Settings(stack.config, register({**plugins, "probe": probe}), Letters(), stack.composed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluate", lambda run: {})
        patch.setattr(Run, "save", lambda run: None)
        patch.setattr(Run, "finished", lambda run: None)
        patch.setattr("grpozoo.run.state.write_manifest", lambda run, finished=False: None)
        run = Run(settings, Accelerator(cpu=True), FOLDER / "-".join(choices or ["base"]), None)
        train(run)
        run.tracker.close()
    return torch.cat([parameter.detach().flatten() for parameter in run.policy.model.parameters()])


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("matrix")


ALONE = sorted(set(methods()) | set(presets()))


@pytest.mark.parametrize("name", ALONE)
def test_each_method_trains_and_is_not_grpo(name):
    if (reason := stacking.refusal(name)) is not None:
        assert name in NEEDS_COMPANY and NEEDS_COMPANY[name] in reason
        return
    weights = trained(name)
    assert bool(weights.isfinite().all())
    assert not torch.equal(weights, trained())


# Methods that do nothing by themselves, and what the refusal says.
NEEDS_COMPANY = {"reference": "reference"}
# Pairs of which one method has nothing to act on, and why.
NONE_NEGATIVE = "it acts on negative advantages, and passk gives none"
IDLE = dict.fromkeys([("dual_clip", "passk"), ("opsm", "passk"), ("passk", "two_sided")], NONE_NEGATIVE)


@pytest.mark.parametrize("first", methods())
def test_each_pair_trains_with_both_effects_or_is_refused_with_the_reason(first):
    wrong = []
    for second in (name for name in methods() if name > first):
        reason = stacking.refusal(first, second)
        if reason is not None:
            if not (first in reason or second in reason):
                wrong.append(f"{first}+{second} is refused without naming either: {reason}")
            continue
        weights = trained(first, second)
        if not bool(weights.isfinite().all()):
            wrong.append(f"{first}+{second} is not finite")
        for fewer in ((), (first,), (second,)):
            alone = fewer and stacking.refusal(*fewer) is not None
            if not alone and (first, second) not in IDLE and torch.equal(weights, trained(*fewer)):
                wrong.append(f"{first}+{second} is the same as {'+'.join(fewer) or 'grpo'}")
    assert not wrong


def test_a_pair_is_composed_as_the_command_line_would():
    from grpozoo.compose.command import compose

    for pair in (("clip_higher", "mgpo"), ("dapo", "stare")):
        composed = stacking.stack(pair).composed
        assert OmegaConf.to_container(composed) == OmegaConf.to_container(compose([f"algo=[{','.join(pair)}]"]))


@pytest.mark.parametrize("name", methods())
def test_the_card_of_each_method_is_what_the_code_says(name):
    """What it says of stacking is this matrix. If this fails: `python tests/doc_tables.py`."""
    page = Path(__file__).parents[1] / "docs" / "methods" / f"{name}.md"
    assert page.read_text(encoding="utf-8") == card(name)
