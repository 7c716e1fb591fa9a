"""Recipes that are presets: which parts they switch on, their numbers on fixture F1, and how a part is taken out."""

import pytest
from omegaconf import OmegaConf

from grpozoo.compose.search_path import CONF
from grpozoo.testing import advantages, compose, loss

PRESETS = ("dapo", "r1_zero", "r1", "deepseek_math")
K3 = (0.020016 - 0.019241) / 0.04  # seq_mean of k3 on F1, from the sheet's two rows; known to 2e-5
DAPO = {
    "clip_higher": {"clip": 0.2, "clip_high": 0.28},
    "aggregation": {"how": "token_mean"},
    "dynamic_sampling": {"max_rounds": 10, "prompts_per_round": None, "on_limit": "train"},
    "overlong": {"max_length": None, "cache": None, "weight": 1.0},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_set_of_plugins_and_nothing_else(name):
    """The core's keys depend on the scale; the file says in comments what was published."""
    file = CONF / "algo" / f"{name}.yaml"
    composed, plain = compose(f"algo={name}")[0], compose()[0]
    assert file.read_text().startswith("# @package plugins\n# ") and "Published" in file.read_text()
    assert set(OmegaConf.load(file)) <= set(composed.plugins)
    composed.plugins = plain.plugins
    assert composed == plain


@pytest.mark.parametrize(
    "name, published",
    [
        ("dapo", "prompts_per_step=512 group_size=16 update.mini_batches=16 lr=1e-6 optim.warmup_steps=320 "
                 "max_completion_length=20480 plugins.answer.weight=2 plugins.dynamic_sampling.prompts_per_round=1536 "
                 "plugins.dynamic_sampling.on_limit=error"),
        ("r1_zero", "prompts_per_step=512 group_size=16 update.mini_batches=16 lr=3e-6 max_completion_length=32768 "
                    "reward=[answer,format]"),
        ("r1", "prompts_per_step=512 group_size=16 update.mini_batches=16 lr=3e-6 max_completion_length=32768"),
        ("deepseek_math", "group_size=64 lr=1e-6 max_completion_length=1024"),
    ],
)  # fmt: skip
def test_the_published_values_are_accepted(name, published):
    config, active = compose(f"algo={name}", *published.split())
    active.hooks.validate(config=config, active=active)


# DAPO


def test_dapo_on_the_worked_example():
    """Sheet 6.2: clip .2/.28 with token_mean; the advantage is GRPO's."""
    value, gradient = loss("algo=dapo")
    assert value == pytest.approx(-0.182516, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.718787, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.033714, 0, -0.029018], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.035442, 0.042432, 0.030505, 0.039170], abs=1e-6)
    assert advantages("algo=dapo").tolist() == advantages().tolist()


def test_dapo_is_four_parts():
    config, active = compose("algo=dapo")
    assert {name: options for name, options in config.plugins.items() if name in DAPO} == DAPO
    answering = active.answering()
    assert answering["policy_loss"] == ["clip_higher"] and answering["aggregation"] == ["aggregation"]
    assert answering["resample"] == ["dynamic_sampling"] and set(answering["reward"]) == {"answer", "overlong"}
    assert not active.needs  # no reference, no KL


@pytest.mark.parametrize(
    "part, value, norm",
    [
        ("clip_higher", -0.166787, 0.558319),  # clip .2/.2, token_mean
        ("dynamic_sampling", -0.182516, 0.718787),
        ("overlong", -0.182516, 0.718787),
    ],
)
def test_each_part_of_dapo_can_be_taken_out(part, value, norm):
    found, gradient = loss("algo=dapo", f"~plugins.{part}")
    assert found == pytest.approx(value, abs=1e-6) and gradient.abs().sum().item() == pytest.approx(norm, abs=1e-6)
    assert part not in compose("algo=dapo", f"~plugins.{part}")[1].plugins


def test_dapo_without_the_token_level_loss_and_without_anything():
    assert loss("algo=dapo", "~plugins.aggregation")[0] == loss("algo=clip_higher")[0]
    assert loss("algo=dapo", *(f"~plugins.{part}" for part in DAPO))[0] == loss()[0]


def test_dapo_with_one_update_per_batch_says_that_its_clip_is_inert():
    config, active = compose("algo=dapo")
    assert any("clip_higher" in notice for notice in active.hooks.validate(config=config, active=active) if notice)
    config, active = compose("algo=dapo", "update.mini_batches=16")
    assert not any(active.hooks.validate(config=config, active=active))


# DeepSeek


def test_deepseek_math_on_the_worked_example():
    """Sheet 6.2: clip + .04 k3, seq_mean."""
    value, gradient = loss("algo=deepseek_math")
    assert value == pytest.approx(0.020016, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.620372, abs=1e-6)


def test_r1_zero_is_grpo_with_a_weak_kl_term():
    assert loss("algo=r1_zero")[0] == pytest.approx(0.019241 + 0.001 * K3, abs=1e-6)
    assert compose("algo=r1_zero")[1].plugins["grpo"].config.clip == 0.2


def test_r1_clips_nothing_below_eleven():
    """On F1 every ratio is below 11: the surrogate is the unclipped ratio."""
    free = loss("plugins.grpo.clip=1", "plugins.grpo.clip_high=1e9")[0]
    assert loss("algo=r1")[0] == pytest.approx(free + 0.001 * K3, abs=1e-6)
    assert free < 0.019241 - 1e-3 or free > 0.019241 + 1e-3


@pytest.mark.parametrize("name", ["r1_zero", "r1"])
def test_the_reference_of_r1_is_a_copy_every_400_steps(name):
    config, active = compose(f"algo={name}")
    assert config.plugins["reference"] == {"every": 400, "share": 1.0} and "ref_logprobs" in active.needs
