"""From the section `plugins` to a manager: what is refused, in which order plugins apply, and what they may rely on."""

import importlib.metadata
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from omegaconf import MISSING

from grpozoo import HOOK_VERSION, Plugin, Rewards, UserError, hookimpl
from grpozoo.cli import tools
from grpozoo.compose import command, search_path
from grpozoo.compose.plugins import activate, create, register
from grpozoo.compose.registry import installed, load_class
from grpozoo.testing import compose, fixture

Colour = Enum("Colour", ["red", "blue"])


@pytest.fixture
def fake(monkeypatch):
    """A function: name, plugin class (or module text) -> installed under that name by the distribution `theirs 1.2`."""
    entries = list(importlib.metadata.entry_points(group="grpozoo"))

    def add(name, cls, distribution="theirs", value=None):
        module = f"fake_{distribution}_{name}"
        if isinstance(cls, type):
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{cls.__name__: cls}))
        entry = importlib.metadata.EntryPoint(name, value or f"{module}:{getattr(cls, '__name__', cls)}", "grpozoo")
        entry = entry._for(SimpleNamespace(name=distribution, version="1.2", metadata={"Name": distribution}))
        entries.append(entry)
        monkeypatch.setattr(
            "grpozoo.compose.registry.entry_points", lambda group: [e for e in entries if e.group == group]
        )
        return entry

    return add


@dataclass
class Options:
    """One option of each kind."""

    count: int = 1
    colour: Colour = Colour.red
    path: str | None = None
    ks: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"count is at least 1, got {self.count}")


class Theirs(Plugin):
    """Half of every weight."""

    Config = Options

    @hookimpl
    def token_weights(self, batch):
        return torch.full_like(batch.advantages, 0.5)


@pytest.mark.parametrize("options, message", [
    ({"cuont": 2}, r"plugins\.theirs: 'theirs' \(from theirs 1\.2\) has no option 'cuont', did you mean 'count'\?\noptions: count, colour, path, ks"),
    ({"count": "many"}, r"plugins\.theirs\.count: Value 'many' of type 'str' could not be converted to Integer"),
    ({"colour": "green"}, r"plugins\.theirs\.colour: Invalid value 'green', expected one of \[red, blue\]"),
    ({"count": 0}, r"plugins\.theirs: count is at least 1, got 0"),
    ({"ks": 3}, r"plugins\.theirs"),
    ({"ks": ["x"]}, r"plugins\.theirs\.ks\[0\]: Value 'x' of type 'str' could not be converted to Integer"),
    (3, r"plugins\.theirs"),
])  # fmt: skip
def test_bad_options_are_refused_with_place_owner_and_choices(fake, options, message):
    fake("theirs", Theirs)
    with pytest.raises(UserError, match=message) as error:
        create("theirs", options)
    assert len(str(error.value).splitlines()) <= 4


def test_an_option_without_default_must_be_given(fake):
    class Required(Theirs):
        @dataclass
        class Config:
            path: str = MISSING

    fake("theirs", Required)
    with pytest.raises(UserError, match=r"plugins\.theirs\.path has no value: set plugins\.theirs\.path=\.\.\."):
        create("theirs", {})
    assert create("theirs", {"path": "x"}).config.path == "x"


def test_options_arrive_with_their_types(fake):
    fake("theirs", Theirs)
    config = create("theirs", {"count": "3", "colour": "blue", "ks": [2, 4]}).config
    assert (config.count, config.colour, config.path, config.ks) == (3, Colour.blue, None, [2, 4])
    assert create("theirs", None).config == Options()


def test_an_unknown_name_lists_what_is_installed(fake):
    fake("theirs", Theirs)
    with pytest.raises(UserError, match=r"unknown plugin 'thiers', did you mean 'theirs'\?\navailable: .*grpo.*theirs"):
        create("thiers", {})


def test_two_distributions_with_one_name_are_refused_naming_both(fake):
    fake("theirs", Theirs)
    fake("theirs", Theirs, distribution="others")
    with pytest.raises(UserError, match=r"theirs 1\.2 and others 1\.2 both bring a grpozoo plugin named 'theirs'"):
        installed()


def test_two_distributions_with_one_name_are_refused_even_when_their_modules_have_one_name(fake):
    fake("theirs", Theirs, value="same:Theirs")
    fake("theirs", Theirs, distribution="others", value="same:Theirs")
    with pytest.raises(UserError, match=r"both bring a grpozoo plugin named 'theirs'"):
        installed()


def test_one_distribution_seen_twice_on_the_path_is_one(fake):
    fake("theirs", Theirs, value="same:Theirs")
    fake("theirs", Theirs, value="same:Theirs")
    assert installed()["theirs"].value == "same:Theirs"


def test_a_broken_module_is_named_with_error_and_place_when_the_config_names_it(fake, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import math\n\nraise RuntimeError('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    fake("broken", None, value="broken_module:Broken")
    assert "broken" in installed()
    with pytest.raises(
        UserError,
        match=r"plugin 'broken' \(broken_module:Broken, from theirs 1\.2\) does not import: RuntimeError\('no GPU'\)\nat .*broken_module\.py:3",
    ):
        create("broken", {})
    assert create("grpo", {}).name == "grpo"  # the others go on


@pytest.mark.parametrize("text, said", [
    ("import sys\nsys.exit('no licence')\n", r"SystemExit\('no licence'\)\nat .*leaving\.py:2"),
    ("import sys\nsys.exit()\n", r"SystemExit\(None\)|SystemExit\(\)"),
    ("def f(): f()\nf()\n", r"RecursionError\("),
])  # fmt: skip
def test_a_module_that_ends_the_program_is_named_like_any_broken_one(fake, tmp_path, monkeypatch, text, said):
    (tmp_path / "leaving.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    fake("leaving", None, value="leaving:Leaving")
    with pytest.raises(
        UserError, match=rf"plugin 'leaving' \(leaving:Leaving, from theirs 1\.2\) does not import: {said}"
    ):
        create("leaving", {})


@pytest.mark.parametrize("text, fault", [
    ("# @package plugins\nmine: {a: [\n", r"it is no YAML: expected the node content.* \(line \d\)"),
    ("# @package plugins\nmine:\n\ta: 1\n", r"it is no YAML: found character .*\(line 3\)"),
    ("# @package plugins\nmine: {x: '\udcff'}\n", r"it is not UTF-8: invalid start byte at byte \d+"),
    ("# @package plugins\n- a\n", "it is no mapping of keys to values"),
    ("# @package plugins and more\nmine: {}\n", r"its first line is '# @package plugins and more', not '# @package plugins'"),
    ("# @package plugins\ndefaults: 5\nmine: {}\n", "its defaults are no list"),
    ("# @package plugins\nmine: 5\n", "mine is a plugin with its options, got 5"),
])  # fmt: skip
def test_a_config_file_that_does_not_read_is_named_with_its_distribution(monkeypatch, tmp_path, text, fault):
    monkeypatch.setattr(search_path, "config_folders", lambda: {"theirs": tmp_path})
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    for words in (["algo=mine"], ["algo=[gspo,mine]"]):
        with pytest.raises(
            UserError, match=rf"^algo=mine: .*algo/mine\.yaml \(from theirs\): (?:{fault})\nmend the file"
        ):
            command.check(words)


def test_a_broken_task_is_called_a_task(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", "grpozoo.ops:Gone", "grpozoo.tasks")
    with pytest.raises(UserError, match=r"^task 'mine' .* does not import: AttributeError"):
        load_class("mine", "grpozoo.tasks", {"mine": entry})


def test_the_list_of_plugins_shows_one_that_would_be_refused_as_broken(fake, capsys):
    class Bare(Plugin):
        def token_weights(self, batch):
            return None

    class Typo(Plugin):
        @hookimpl
        def policy_loss(self, batch, output):
            return batch.advantages

    fake("bare", Bare)
    fake("typo", Typo)
    fake("theirs", Theirs)
    assert tools.plugins(["bare", "theirs", "typo"]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"bare  \(theirs 1\.2\)\n    BROKEN\n    .*token_weights\(\) is a hook and lacks the decorator", out
    )
    assert re.search(r"typo  \(theirs 1\.2\)\n    BROKEN\n    plugin 'typo' does not fit the hooks: .*output", out)
    assert re.search(r"theirs  \(theirs 1\.2\)\n    .*\n    hooks: token_weights", out)


def test_a_value_of_megabytes_is_cut_in_the_message(fake):
    fake("theirs", Theirs)
    with pytest.raises(UserError, match=r"plugins\.theirs\.count: Value 'x{100,}\.\.\. \(\d+ characters\)") as error:
        create("theirs", {"count": "x" * 3_000_000})
    assert len(str(error.value)) < 1000
    names = ", ".join(f"plugin_number_{number}" for number in range(60))
    assert str(UserError(f"available: {names}")) == f"available: {names}"  # a list of names is no such value
    assert len(str(UserError("a, " * 10_000))) < 4000


def test_a_class_that_is_missing_from_its_module_is_a_users_error(fake):
    fake("gone", None, value="grpozoo.ops:Gone")
    with pytest.raises(UserError, match=r"plugin 'gone' .* does not import: AttributeError"):
        load_class("gone")


def test_what_is_no_plugin_is_refused(fake):
    fake("number", None, value="math:pi")
    with pytest.raises(
        UserError, match=r"plugin 'number' \(from theirs 1\.2\): 3\.14.* is not a subclass of grpozoo\.Plugin"
    ):
        create("number", {})


def test_another_hook_version_names_both_versions(fake):
    class Old(Theirs):
        hook_version = HOOK_VERSION + 1

    fake("old", Old)
    with pytest.raises(
        UserError, match=rf"written for hook version {HOOK_VERSION + 1}, this grpozoo has {HOOK_VERSION}"
    ):
        create("old", {})


def test_a_constructor_that_raises_is_named_with_error_and_place(fake):
    class Broken(Theirs):
        def __init__(self, config):
            raise KeyError("weights")

    fake("broken", Broken)
    with pytest.raises(
        UserError, match=r"plugins\.broken: Broken\(\) raised KeyError\('weights'\)\nat .*test_plugins\.py"
    ):
        create("broken", {})


def test_an_unknown_need_is_refused_with_the_nearest(fake):
    class Needy(Theirs):
        needs = frozenset({"entropies"})

    fake("needy", Needy)
    with pytest.raises(UserError, match=r"unknown need of plugin 'needy' 'entropies', did you mean 'entropy'\?"):
        create("needy", {})


def composed(*overrides, **more):
    """Active plugins of a command line, with further ones registered last."""
    _, active = compose(*overrides)
    for name, plugin in more.items():
        plugin.name = name
    return register({**active.plugins, **more})


def made(cls):
    return cls(cls.Config())


def test_two_plugins_that_replace_one_hook_are_refused_naming_both_and_the_hook():
    class Mine(Plugin):
        @hookimpl
        def advantage(self, rewards):
            return rewards.total

    class Yours(Mine):
        @hookimpl
        def advantage(self, rewards):
            return -rewards.total

    with pytest.raises(
        UserError, match=r"mine and yours both replace advantage\(\): keep one, drop the other with ~plugins\.NAME"
    ):
        composed(mine=made(Mine), yours=made(Yours))
    assert composed(mine=made(Mine)).answering()["advantage"] == ["mine"]


def test_a_plain_answer_to_a_chain_hook_is_told_to_become_a_wrapper_when_there_are_two():
    class Mine(Plugin):
        @hookimpl
        def transform_rewards(self, rewards):
            return rewards

    class Yours(Mine):
        @hookimpl
        def transform_rewards(self, rewards):
            return rewards

    with pytest.raises(UserError, match=r"mine and yours both replace transform_rewards\(\): write it as a wrapper"):
        composed(mine=made(Mine), yours=made(Yours))


def test_a_hook_that_does_not_exist_is_named_with_the_nearest():
    class Typo(Plugin):
        @hookimpl
        def advantages(self, rewards):
            return rewards.total

    with pytest.raises(UserError, match=r"unknown hook in plugin 'typo': 'advantages', did you mean 'advantage'\?"):
        composed(typo=made(Typo))


def test_an_argument_that_does_not_exist_is_named():
    class Typo(Plugin):
        @hookimpl
        def policy_loss(self, batch, output):
            return batch.advantages

    with pytest.raises(UserError, match=r"plugin 'typo' does not fit the hooks: .*output"):
        composed(typo=made(Typo))


def test_a_hook_without_its_decorator_is_refused():
    class Bare(Plugin):
        def token_weights(self, batch):
            return None

    class Overridden(Theirs):
        def token_weights(self, batch):
            return None

    for cls in (Bare, Overridden):
        with pytest.raises(
            UserError, match=r"plugin 'bare': token_weights\(\) is a hook and lacks the decorator @hookimpl"
        ):
            composed(bare=made(cls))


@pytest.mark.parametrize(
    "dropped, hook",
    [("iid", "token_sampler"), ("native", "generate"), ("full", "select_parameters"), ("grpo", "advantage")],
)
def test_a_hook_that_nobody_answers_stops_the_run(dropped, hook):
    _, active = compose()
    with pytest.raises(UserError, match=rf"no plugin answers {hook}\(\)"):
        register({name: plugin for name, plugin in active.plugins.items() if name != dropped})


def test_wrappers_apply_in_the_order_of_the_configuration():
    class Add(Plugin):
        @hookimpl(wrapper=True)
        def transform_rewards(self):
            rewards = yield
            return Rewards(rewards.components, rewards.weights, total=rewards.total + 1)

    class Double(Plugin):
        @hookimpl(wrapper=True)
        def transform_rewards(self):
            rewards = yield
            return Rewards(rewards.components, rewards.weights, total=rewards.total * 2)

    step = fixture()
    plain = step.rewards.total
    for order, expected in ((("add", "double"), (plain + 1) * 2), (("double", "add"), plain * 2 + 1)):
        made_of = {"add": made(Add), "double": made(Double)}
        active = composed(**{name: made_of[name] for name in order})
        total = active.hooks.transform_rewards(rollouts=step.rollouts, rewards=step.rewards, run=None).total
        assert torch.equal(total, expected)
        assert active.answering()["transform_rewards"] == list(order)


def test_a_wrapper_rescales_whichever_advantage_is_active():
    class Half(Plugin):
        @hookimpl(wrapper=True)
        def advantage(self):
            return (yield) / 2

    class Raw(Plugin):
        @hookimpl
        def advantage(self, rewards):
            return rewards.total

    step = fixture()
    active = composed(half=made(Half), raw=made(Raw))
    assert torch.equal(
        active.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None), step.rewards.total / 2
    )
    assert active.answering()["advantage"] == ["raw", "half"]


def test_none_is_no_opinion_and_the_foundation_answers():
    class Shy(Plugin):
        @hookimpl
        def advantage(self, rewards):
            return None

    step = fixture()
    answer = composed(shy=made(Shy)).hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None)
    assert answer[0].item() == pytest.approx(0.865875, abs=1e-6)


def test_a_plugin_of_version_1_keeps_working_when_arguments_are_added():
    """Frozen in 2026: names two of the arguments of each hook and ignores the rest."""

    class Frozen(Plugin):
        hook_version = 1

        @hookimpl
        def advantage(self, rewards):
            return rewards.total - rewards.total.mean()

        @hookimpl
        def token_weights(self, batch):
            return batch.mask * 0.5

        @hookimpl
        def after_step(self, metrics):
            metrics["frozen/seen"] = 1.0

    step, metrics = fixture(), {}
    hooks = composed(frozen=made(Frozen)).hooks
    assert hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None)[0].item() == pytest.approx(
        0.5625
    )  # 1 - 3.5 / 8
    assert [weights.max().item() for weights in hooks.token_weights(batch=step.batch, out=step.out)] == [0.5]
    hooks.after_step(step=1, metrics=metrics, run=None)
    assert metrics == {"frozen/seen": 1.0}


def test_needs_are_the_union_of_the_plugins_needs():
    assert compose()[1].needs == frozenset()
    assert compose("plugins.grpo.kl_coef=0.1")[1].needs == {"ref_logprobs", "all_rows"}


def test_the_manifest_names_distribution_source_hash_and_hooks_in_order():
    _, active = compose("reward=[answer,overlong]")
    manifest = active.manifest()
    assert list(manifest["plugins"]) == ["answer", "full", "grpo", "iid", "native", "overlong"]  # of one order: by name
    entry = manifest["plugins"]["grpo"]
    assert (
        entry["class"] == "grpozoo_plugins.grpo:Grpo"
        and entry["distribution"].startswith("grpozoo ")
        and len(entry["sha256"]) == 64
    )
    assert manifest["hooks"]["advantage"] == ["grpo"] and sorted(manifest["hooks"]["reward"]) == ["answer", "overlong"]


def test_nothing_is_active_because_it_is_installed(fake):
    fake("theirs", Theirs)
    assert "theirs" not in compose()[1].plugins
    names = ("grpo", "iid", "native", "full", "answer")
    assert "theirs" in activate({**{name: {} for name in names}, "theirs": None}).plugins
