"""The conformance kit: every built-in passes it, and every fault that it promises to find is found."""

import importlib.metadata
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from grpozoo import Plugin, hookimpl, masked_mean
from grpozoo.compose import search_path
from grpozoo.compose.registry import installed
from grpozoo.sampling import TokenSampler, uniforms
from grpozoo.testing import CHECKS, ConformanceError, advantages, check_plugin, example, fixture, loss
from grpozoo.testing import options as kit_options
from grpozoo.testing.pieces import draw

BUILT_IN = sorted(name for name, entry in installed().items() if entry.dist.name == "grpozoo")


@pytest.fixture(scope="session")
def score_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "score.py"
    file.write_text("def score(text, answer):\n    return float(text == answer)\n")
    return file


SWITCHED_ON_BY = {"reference": ["algo=[kl,reference]"]}  # the others: by their own config file
BEYOND_THE_GROUP = {  # what a baseline that is not the mean of the group's rewards cannot pass
    "ppo": ["equal rewards", "singleton"],  # the critic's value
    "remax": ["equal rewards", "singleton"],  # the greedy completion's reward
    "reinforce_pp": ["singleton"],  # the batch
    "reinforce_pp_baseline": ["singleton"],  # whitened over the batch
}
STEP_REWARDS = {"process", "steps"}  # conform on data that have steps: tests/plugins


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - STEP_REWARDS))
def test_every_built_in_conforms(name, score_file):
    extra = ["reward=function", f"plugins.function.path={score_file}:score"] if name == "function" else []
    if name == "math":
        pytest.importorskip("math_verify")
    done = check_plugin(name, *extra, *SWITCHED_ON_BY.get(name, []), skip=BEYOND_THE_GROUP.get(name, []))
    assert {"composes", "yaml", "options are read", "state", "metrics"} <= set(done)


def test_a_plugin_with_an_option_switched_on_conforms():
    assert "zero advantage" in check_plugin("grpo", "algo=grpo", "plugins.grpo.kl_coef=0.04", "plugins.grpo.std=batch")


# The worked example F1, to six digits


def test_fixture_has_27_tokens_and_the_advantages_of_the_sheet():
    step = fixture()
    assert int(step.batch.mask.sum()) == 27
    expected = [0.865875, -0.865875, -0.865875, 0.865875, -0.783186, 0.261062, 1.305310, -0.783186]
    assert step.batch.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert advantages().tolist() == pytest.approx(expected, abs=1e-6)
    ratios = (step.out.logprobs - step.batch.old_logprobs).detach()
    assert ratios[1].tolist() == pytest.approx([-0.30, 0.10, 0.28, -0.05, 0.20])


def test_loss_and_gradient_of_the_sheet_come_through_the_shipped_functions():
    value, gradient = loss()
    assert value == pytest.approx(0.019241, abs=1e-6) and gradient.abs().sum().item() == pytest.approx(
        0.614639, abs=1e-6
    )
    assert gradient[0].tolist() == pytest.approx([-0.037928, 0, -0.032645, 0, 0], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.023924, 0.028642, 0.020591, 0.026440], abs=1e-6)
    assert loss("plugins.grpo.aggregation=token_mean")[0] == pytest.approx(-0.166787, abs=1e-6)
    assert loss("plugins.grpo.kl_coef=0.04")[0] == pytest.approx(0.020016, abs=1e-6)


def test_given_advantages_replace_the_plugins_own():
    plain, _ = loss(advantages=[2 * a for a in advantages().tolist()])
    assert plain == pytest.approx(2 * loss()[0], abs=1e-12)  # the surrogate is homogeneous in A


def test_float32_gives_the_numbers_to_its_own_precision():
    assert loss(step=fixture(torch.float32))[0] == pytest.approx(loss()[0], abs=1e-6)


def test_a_row_without_reward_leaves_its_group():
    """[1, 0, None, None] centred is [.5, -.5, -, -], not [.75, -.25, -.25, -.25]."""
    step = fixture()
    total = torch.tensor([1.0, 0.0, float("nan"), float("nan"), 0.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    step = step._replace(rewards=replace(step.rewards, components={"answer": total}, total=total))
    assert advantages("plugins.grpo.std=none", step=step)[:4].tolist() == [0.5, -0.5, 0.0, 0.0]


def test_the_ragged_example_has_every_awkward_row():
    step = example()
    ids, lengths = step.rollouts.group_id.tolist(), step.rollouts.lengths.tolist()
    assert sorted(ids.count(group) for group in set(ids)) == [1, 2, 3, 5]
    assert ids != sorted(ids) and {0, 1} <= set(lengths) and int(step.rewards.total.isnan().sum()) == 1


# What the kit must find: a plugin for each fault


class Factors(Plugin):
    """Token weights by a function of the batch."""

    @hookimpl
    def token_weights(self, batch, out):
        return self.weigh(batch, out)

    def weigh(self, batch, out):
        return torch.ones_like(batch.advantages)


class UnmaskedMean(Factors):
    def weigh(self, batch, out):
        return (out.logprobs.detach().mean(1, keepdim=True) < -0.5) * 1.0 + 0.5


class MaskByProduct(Factors):
    def weigh(self, batch, out):
        return 1 + (out.logprobs.detach() * batch.mask).sum(1, keepdim=True).abs()


class BatchMean(Factors):
    def weigh(self, batch, out):
        return out.logprobs.detach() / masked_mean(out.logprobs.detach(), batch.mask)


class ByPosition(Factors):
    def weigh(self, batch, out):
        return (torch.arange(len(batch.mask)) % 2 + 1.0)[:, None].expand(batch.mask.shape)


class ByGroupNumber(Factors):
    def weigh(self, batch, out):
        return 1 + (batch.group_id > 7)[:, None].double().expand(batch.mask.shape)


class InPlace(Factors):
    def weigh(self, batch, out):
        batch.advantages.mul_(2)
        return torch.ones_like(batch.advantages)


class WrongShape(Factors):
    def weigh(self, batch, out):
        return torch.ones(batch.mask.shape[1])


class NotZero(Plugin):
    @hookimpl
    def policy_loss(self, batch, out):
        return -(batch.advantages + 0.1) * out.logprobs


class Undeclared(Plugin):
    @hookimpl
    def token_weights(self, batch, out):
        return 1 + out.entropy


class Unlisted(Plugin):
    @hookimpl
    def regularizer(self, batch, out):
        return 0.1 * out.logprobs


class Logs(Factors):
    def weigh(self, batch, out):
        self.log("gate", 1.0)
        return torch.ones_like(batch.advantages)


class Ignored(Factors):
    @dataclass
    class Config:
        strength: float = 1.0

        def __post_init__(self):
            if self.strength < 0:
                raise ValueError("negative")


class Forgets(Factors):
    def __init__(self, config):
        super().__init__(config)
        self.calls = 0

    @hookimpl
    def after_step(self):
        self.calls += 1

    def weigh(self, batch, out):
        return torch.full_like(batch.advantages, 1.0 + self.calls)


class Unpicklable(Factors):
    def state_dict(self):
        return {"self": Ignored}


class ZeroScore(Plugin):
    @hookimpl
    def advantage(self, rollouts, rewards):
        return (rewards.total.nan_to_num(0.0) - rewards.total.nan_to_num(0.0).mean()) * (rollouts.group_id > -1e9)


class TinySpread(Plugin):
    @hookimpl
    def advantage(self, rollouts, rewards):
        total = rewards.total.float().nan_to_num(0.0)
        index = rollouts.group_id.unique(return_inverse=True)[1]
        mean = torch.zeros(4).index_add(0, index, total) / torch.zeros(4).index_add(0, index, torch.ones(len(index)))
        return (total - mean[index]) / 1e-8


class Replaces(Plugin):
    @hookimpl
    def transform_rewards(self, rewards):
        return replace(rewards, total=rewards.total)


class NoReturn(Plugin):
    @hookimpl(wrapper=True)
    def transform_rewards(self):
        yield


class RowNumber(Plugin):
    @hookimpl
    def reward(self, rollouts):
        return {"row": list(range(len(rollouts)))}


class Short(Plugin):
    @hookimpl
    def reward(self, rollouts):
        return {"row": [1.0]}


class Notes(Plugin):
    """Keeps a fact of each row where the row was sampled."""

    def __init__(self, config):
        super().__init__(config)
        self.first = {}

    @hookimpl(wrapper=True)
    def generate(self):
        rollouts = yield
        keys = zip(rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True)
        self.first |= dict(zip(keys, rollouts.completion_ids[:, 0].tolist(), strict=True))
        return rollouts

    @hookimpl(wrapper=True)
    def advantage(self, rollouts):
        A = yield
        keys = zip(rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True)
        return A * torch.tensor([1.0 + self.first.get(key, 0) for key in keys])


class Waits(Plugin):
    """Only the first process asks for something that all must ask for."""

    @hookimpl(wrapper=True)
    def transform_rewards(self, run):
        rewards = yield
        if run.rank == 0:
            run.sum(rewards.total)
        return rewards


class AsksInReward(Plugin):
    @hookimpl
    def reward(self, rollouts, run):
        return {"row": run.generate([])}


class Raises(Factors):
    def weigh(self, batch, out):
        return {}["nothing"]


class Everything(Plugin):
    @hookimpl
    def select_parameters(self, policy):
        policy.model.requires_grad_(True)
        return [{"params": list(policy.model.parameters())[:1]}]


class SameNumber(TokenSampler):
    """All rows of a call share one uniform number."""

    def next(self, choice, rows, position):
        generator = torch.Generator().manual_seed(position)
        return choice.pick(torch.rand(1, generator=generator, dtype=torch.float64).expand(len(rows)))[0]


class Stale(TokenSampler):
    """The number of the first position serves all positions."""

    def start(self, requests, seed, step, max_tokens):
        rows = [(request, sample) for request in requests for sample in request.sample_ids]
        self.numbers = torch.tensor([uniforms(seed, step, request, sample, 0, 1)[0] for request, sample in rows])

    def next(self, choice, rows, position):
        return choice.pick(self.numbers[rows])[0]


class SameNumbers(Plugin):
    @hookimpl
    def token_sampler(self):
        return SameNumber()


class StaleNumbers(Plugin):
    @hookimpl
    def token_sampler(self):
        return Stale()


class Likeliest(Plugin):
    @hookimpl
    def token_sampler(self):
        return TokenSampler()


@pytest.fixture
def strange(monkeypatch, tmp_path):
    """A function: class -> installed as the plugin `strange`, with a config file unless yaml=False."""
    entries = list(importlib.metadata.entry_points(group="grpozoo"))

    def add(cls, yaml=True):
        folders = search_path.config_folders() | ({"stranger": tmp_path} if yaml else {})
        for module in (search_path, kit_options):
            monkeypatch.setattr(module, "config_folders", lambda: folders)
        (tmp_path / "algo").mkdir()
        options = OmegaConf.to_container(OmegaConf.structured(cls.Config), enum_to_str=True)
        text = OmegaConf.to_yaml({"strange": options})
        (tmp_path / "algo" / "strange.yaml").write_text(f"# @package plugins\n{text}")
        entry = importlib.metadata.EntryPoint("strange", f"{__name__}:{cls.__name__}", "grpozoo")
        entry = entry._for(SimpleNamespace(name="stranger", version="0.1", metadata={"Name": "stranger"}))
        monkeypatch.setattr(
            "grpozoo.compose.registry.entry_points", lambda group: [*(e for e in entries if e.group == group), entry]
        )

    return add


def faults(*overrides, **options):
    """Names of the checks that the plugin `strange` fails."""
    try:
        check_plugin("strange", *(overrides or ["+plugins.strange={}"]), **options)
    except ConformanceError as error:
        heads = [line for line in str(error).splitlines() if not line.startswith(" ")]
        assert all("plugin 'strange' fails '" in line for line in heads) and len(heads) == str(error).count("because")
        return {line.split("fails '")[1].split("'")[0] for line in heads}
    return set()


SAMPLER = ("~plugins.iid", "+plugins.strange={}")


@pytest.mark.parametrize("cls, overrides, expected", [
    (Factors, (), set()),
    (UnmaskedMean, (), {"padding", "garbage", "micro-batches"}),
    (MaskByProduct, (), {"garbage"}),
    (BatchMean, (), {"micro-batches"}),
    (ByPosition, (), {"row order", "micro-batches"}),
    (ByGroupNumber, (), {"group ids"}),
    (InPlace, (), {"inputs"}),
    (WrongShape, (), {"row order", "padding", "zero advantage"}),
    (NotZero, (), {"zero advantage"}),
    (Undeclared, (), {"mask"}),
    (Unlisted, (), {"mask"}),
    (Logs, (), {"metrics"}),
    (Ignored, (), {"options are read"}),
    (Forgets, (), {"state"}),
    (Unpicklable, (), {"state"}),
    (ZeroScore, (), {"missing rewards"}),
    (TinySpread, (), {"equal rewards"}),
    (Replaces, (), {"kinds"}),
    (NoReturn, (), {"transform"}),
    (RowNumber, (), {"reward"}),
    (Short, (), {"reward"}),
    (Notes, (), {"processes"}),
    (Waits, (), {"processes"}),
    (AsksInReward, (), {"reward", "processes"}),
    (Raises, (), {"inputs", "mask", "processes"}),
    (Everything, ("~plugins.full", "+plugins.strange={}"), {"parameters"}),
    (SameNumbers, SAMPLER, {"law"}),
    (StaleNumbers, SAMPLER, {"law"}),
    (Likeliest, SAMPLER, {"law", "calls"}),
])  # fmt: skip
def test_each_fault_is_found_and_a_plain_plugin_has_none(strange, cls, overrides, expected):
    strange(cls)
    found = faults(*overrides)
    assert expected <= found if expected else not found


def test_a_fault_is_told_with_plugin_place_and_reason(strange):
    strange(MaskByProduct)
    with pytest.raises(
        ConformanceError,
        match=r"plugin 'strange' fails 'garbage': with inf at masked positions, token_weights: .*\n    because masked log-prob",
    ):
        check_plugin("strange")


def told(*overrides):
    """All that the kit says about `strange`."""
    with pytest.raises(ConformanceError) as error:
        check_plugin("strange", *(overrides or ["+plugins.strange={}"]))
    return str(error.value)


def test_a_hook_that_raises_is_told_once_with_plugin_hook_and_place(strange):
    strange(Raises)
    text = told()
    assert text.count("plugins.strange: token_weights() raised KeyError('nothing')\n    at ") == 1
    assert "plugin 'strange' fails 'padding': as in 'inputs'\n    because" in text


def test_what_a_row_left_on_its_process_is_told_in_plain_words(strange):
    strange(Notes)
    text = told()
    assert "fails 'processes': advantage of step 1 is another one in each of two processes" in text
    assert "because what a plugin notes about rows stays on the process that saw them" in text


def test_a_process_that_would_wait_for_ever_is_told(strange):
    strange(Waits)
    assert re.search(r"process 0 comes to sum\(\) of .* and process 1 to .*: a run would hang there", told())


def test_a_plugin_without_a_config_file_fails_with_what_to_add(strange):
    strange(Factors, yaml=False)
    message = r"fails 'yaml': it has no config file: add GROUP/strange\.yaml, which begins with '# @package plugins'"
    with pytest.raises(ConformanceError, match=message):
        check_plugin("strange")


def test_a_check_can_be_skipped_by_name_and_only_by_a_known_one(strange):
    strange(TinySpread)
    assert "equal rewards" not in faults(skip={"equal rewards"})
    with pytest.raises(ValueError, match="no check is named equal reward"):
        check_plugin("strange", skip={"equal reward"})


def test_a_plugin_that_does_not_load_fails_one_check_with_the_message_a_user_gets(strange):
    strange(Factors)
    with pytest.raises(
        ConformanceError,
        match=r"fails 'composes': plugins\.strange: 'strange' \(from stranger 0\.1\) has no option 'x'",
    ):
        check_plugin("strange", "+plugins.strange.x=1")


def test_a_command_line_without_the_plugin_is_told(strange):
    strange(Factors)
    with pytest.raises(ConformanceError, match=r"fails 'composes': algo=grpo does not switch it on"):
        check_plugin("strange", "algo=grpo")


def test_checks_have_different_names_and_a_reason_of_one_line():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.reason and "\n" not in check.reason for check in CHECKS)


def test_drawing_touches_no_global_random_state(strange):
    from grpozoo.testing.context import Context
    from grpozoo.testing.golden import compose
    from grpozoo.testing.pieces import _requests

    config, active = compose()
    before = torch.random.get_rng_state()
    tokens = draw(active.hooks.token_sampler(run=None), _requests(3), Context(config, active), positions=3)
    assert tokens.shape == (12, 3) and torch.equal(before, torch.random.get_rng_state())
