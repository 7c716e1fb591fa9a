"""The composition matrix: each pair of methods trains, and both have an effect, or is refused before a model is loaded.

A pair has an effect if what it does is finite and differs from what GRPO alone and what each of the two methods alone do:
no method is dropped in silence. It is looked for where it shows first:

    the loss and its gradient on a worked example   if all that both do is answer hooks of the update: the rows of a step are
                                                    given, so training is this gradient and nothing else can tell them apart
    the weights after one step                      of the others, and of pairs that the example does not tell apart; two
                                                    optimizer steps on a random policy of one layer
    the weights after three steps                   of pairs that act later: on a state, a reference, a gate

The marker `matrix` trains every pair for the three steps, wherever its effect shows.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from grpozoo import Plugin, Prompt, hookimpl
from grpozoo.cli.card import card, methods, presets
from grpozoo.compose import stacking
from grpozoo.compose.plugins import register
from grpozoo.compose.registry import load_class
from grpozoo.compose.settings import Settings
from grpozoo.hooks import KINDS
from grpozoo.loop import train
from grpozoo.run.run import Run
from grpozoo.tasks import Task
from grpozoo.testing import fixture
from grpozoo.testing.golden import loss_of

SMALL = [
    "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "max_completion_length=6",
    "prompts_per_step=4", "group_size=3", "lr=3e-2", "update.mini_batches=2", "logger.trackers=[]",
    "logger.progress=false",
]  # fmt: skip
STEPS = 3
# What decides the gradient once the rows of a step are given
UPDATE = {
    "validate", "setup", "token_rewards", "advantage", "before_update", "minibatch", "policy_loss", "aggregation",
    "token_weights", "regularizer", "after_step",
}  # fmt: skip
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
        return {"right": right, "sums": sums, "halves": halves(rollouts, right, sums)}


def halves(rollouts, first, second):
    """A reward of each row's first half and one of its second: R matrices [2, 2] of (last token, reward)."""
    ends = (rollouts.lengths.clamp(min=1) - 1).tolist()
    rows = zip(ends, first, second, strict=True)
    return [torch.tensor([[end // 2, one], [end, other]], dtype=torch.float64) for end, one, other in rows]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(choices):
    return {name: ACTIVE[name] for choice in choices for name in stacking.content(choice) if name in ACTIVE}


@cache
def weights(steps: int, *choices) -> torch.Tensor:
    """All weights after so many steps, as one vector."""
    from accelerate import Accelerator

    stack = stacking.stack(choices, options(choices), [*SMALL, f"steps={steps}"])
    plugins = {name: plugin for name, plugin in stack.active.plugins.items() if name != "answer"}
    probe = Probe(Probe.Config())
    probe.name = "probe"
    settings = Settings(stack.config, register({**plugins, "probe": probe}), Letters(), stack.composed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluate", lambda run: {})
        patch.setattr(Run, "save", lambda run: None)
        patch.setattr(Run, "finished", lambda run: None)
        patch.setattr("grpozoo.run.state.write_manifest", lambda run, finished=False: None)
        run = Run(settings, Accelerator(cpu=True), FOLDER / "-".join([*choices, str(steps)]), None)
        train(run)
        run.tracker.close()
    return torch.cat([parameter.detach().flatten() for parameter in run.policy.model.parameters()])


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("matrix")


def after_one_step(*choices):
    return weights(1, *choices)


def after_three_steps(*choices):
    return weights(STEPS, *choices)


@cache
def on_the_worked_example(*choices) -> torch.Tensor:
    """The loss of two groups of four rows and its gradient with respect to their log-probabilities, as one vector."""
    stack = stacking.stack(choices, options(choices))
    step = fixture()
    total = step.rewards.total.tolist()
    vectors = {"halves": tuple(halves(step.rollouts, total, total[::-1]))}
    step = step._replace(rewards=replace(step.rewards, vectors=vectors))
    value, gradient = loss_of(stack.config, stack.active, step)
    return torch.cat([torch.tensor([value], dtype=gradient.dtype), gradient.flatten()])


@cache
def acts_in_the_update_alone(choice: str) -> bool:
    """Whether its plugins answer no hook that another choice of rows, rewards, parameters or samplers comes from."""
    answered = {hook for name in stacking.content(choice) for hook in KINDS if answers(load_class(name), hook)}
    return answered <= UPDATE


def answers(cls: type, hook: str) -> bool:
    return hasattr(getattr(cls, hook, None), "grpozoo_impl")


def swallowed(effect, first: str, second: str) -> list[str]:
    """What the effect of the pair cannot be told from: GRPO, or one of the two alone."""
    pair = effect(first, second)
    assert bool(pair.isfinite().all()), f"{first}+{second} is not finite"
    return [
        f"{first}+{second} is the same as {'+'.join(fewer) or 'grpo'}"
        for fewer in ((), (first,), (second,))
        if not (fewer and stacking.refusal(*fewer))
        and (first, second) not in IDLE
        and torch.equal(pair, effect(*fewer))
    ]


ALONE = sorted(set(methods()) | set(presets()))


@pytest.mark.parametrize("name", ALONE)
def test_each_method_trains_and_is_not_grpo(name):
    if (reason := stacking.refusal(name)) is not None:
        assert name in NEEDS_COMPANY and NEEDS_COMPANY[name] in reason
        return
    assert bool(after_three_steps(name).isfinite().all())
    assert not torch.equal(after_three_steps(name), after_three_steps())


# Methods that do nothing by themselves, and what the refusal says.
NEEDS_COMPANY = {"reference": "reference"}
# Pairs of which one method has nothing to act on, and why.
NONE_NEGATIVE = "it acts on negative advantages, and passk gives none"
IDLE = dict.fromkeys([("dual_clip", "passk"), ("opsm", "passk"), ("passk", "two_sided")], NONE_NEGATIVE)


def stacks(first):
    """The later methods that go with it; a refusal must say of which of the two it speaks."""
    for second in (name for name in methods() if name > first):
        reason = stacking.refusal(first, second)
        assert reason is None or first in reason or second in reason, f"{first}+{second} is refused: {reason}"
        if reason is None:
            yield second


@pytest.mark.parametrize("first", methods())
def test_each_pair_has_both_effects_or_is_refused_with_the_reason(first):
    wrong = []
    for second in stacks(first):
        looks = [after_one_step, after_three_steps]
        if acts_in_the_update_alone(first) and acts_in_the_update_alone(second):
            looks.insert(0, on_the_worked_example)
        for look in looks:
            if not (faults := swallowed(look, first, second)):
                break
        else:
            wrong += faults
    assert not wrong


@pytest.mark.matrix
@pytest.mark.parametrize("first", methods())
def test_each_pair_trains_with_both_effects(first):
    assert [fault for second in stacks(first) for fault in swallowed(after_three_steps, first, second)] == []


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
