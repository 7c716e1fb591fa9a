"""How methods stack: order of application, rival controllers, declared conflicts, and choices that contradict each other."""

from dataclasses import replace

import pytest
from commands import grpozoo

from grpozoo import Plugin, UserError, hookimpl
from grpozoo.compose.command import compose
from grpozoo.compose.plugins import Active, register


class Scale(Plugin):
    @hookimpl(wrapper=True)
    def transform_rewards(self):
        rewards = yield
        return replace(rewards, total=rewards.total * 2)


def active(**classes) -> Active:
    """The default plugins and further ones, registered as listed."""
    from grpozoo.testing import compose as composed

    plugins = dict(composed()[1].plugins)
    for name, cls in classes.items():
        plugins[name] = cls(cls.Config())
        plugins[name].name = name
    return register(plugins)


def test_two_controllers_of_one_quantity_are_refused_with_the_reason():
    steering = type("Steering", (Plugin,), {"controls": frozenset({"entropy"})})
    with pytest.raises(UserError, match="a and b both control the entropy: two controllers"):
        active(b=steering, a=steering)
    active(a=steering, b=type("Other", (Plugin,), {"controls": frozenset({"kl"})}))


def test_a_declared_conflict_is_refused_with_its_reason_from_either_side():
    shy = type("Shy", (Plugin,), {"conflicts": {"scale": "it reads the unscaled reward"}})
    for classes in ({"shy": shy, "scale": Scale}, {"scale": Scale, "shy": shy}):
        with pytest.raises(UserError, match="shy does not stack with scale: it reads the unscaled reward"):
            active(**classes)


@pytest.mark.parametrize("algo", ["[mgpo,entropy_advantage]", "[entropy_advantage,mgpo]"])
def test_the_order_on_the_command_line_is_not_the_order_of_application(algo):
    from grpozoo.testing import compose as composed

    assert composed(f"algo={algo}")[1].answering()["advantage"] == ["grpo", "mgpo", "entropy_advantage"]
    by_hand = composed(f"algo={algo}", "order=[entropy_advantage,mgpo]")[1]
    assert by_hand.answering()["advantage"] == ["grpo", "entropy_advantage", "mgpo"]


def test_an_order_that_names_an_absent_plugin_is_refused():
    from grpozoo.testing import compose as composed

    with pytest.raises(UserError, match="unknown plugin in order 'mgop', did you mean 'mgpo'"):
        composed("algo=mgpo", "order=[mgop]")


def test_two_choices_that_give_one_option_two_values_are_refused():
    with pytest.raises(UserError, match=r"algo=deepseek_math sets plugins.grpo.kl_coef=0.04 and algo=r1_zero sets"):
        compose(["algo=[deepseek_math,r1_zero]"])
    assert compose(["algo=[deepseek_math,r1_zero]", "plugins.grpo.kl_coef=0.01"]).plugins.grpo.kl_coef == 0.01


def test_explain_prints_what_a_command_line_would_run_in_the_order_of_application():
    answer = grpozoo("explain", "algo=[entropy_advantage,mgpo]")
    assert answer.status == 0 and "plugins, in the order of application" in answer.out
    assert "grpo, mgpo, entropy_advantage" in answer.out
    assert "clip_higher" in grpozoo("explain", "algo=clip_higher").out.splitlines()[-1]  # its notice: inert here
