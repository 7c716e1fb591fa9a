"""What a plugin may do wrong in a hook, and the sentence that names plugin, hook, what came and what is expected."""

import inspect
from dataclasses import replace

import pytest
import torch

from grpozoo import Plugin, Prompt, Request, UserError, concatenate, hookimpl, hooks
from grpozoo.calls.answers import EXPECTED
from grpozoo.compose.plugins import Defaults, register
from grpozoo.hooks import KINDS
from grpozoo.run.state import plugin_states
from grpozoo.testing import Context, compose, fixture
from grpozoo.update import minibatch_tables

NAN, INF = float("nan"), float("inf")
CONFIG, ACTIVE = compose()
STEP = fixture()
MASK = STEP.batch.mask  # [8, 5]
REQUESTS = [Request(Prompt("p0", text="1 2"), 0, (0, 1)), Request(Prompt("p1", text="3"), 1, (0, 1))]
GENERATED = Context(CONFIG, ACTIVE).generate(REQUESTS)
ARGUMENTS = {
    "config": CONFIG, "active": ACTIVE, "policy": None, "prompts": [request.prompt for request in REQUESTS], "run": None,
    "requests": REQUESTS, "sampler": None, "law": None, "rollouts": STEP.rollouts, "rewards": STEP.rewards,
    "advantages": STEP.batch.advantages, "batch": STEP.batch, "out": STEP.out, "step": 1,
}  # fmt: skip


def hook_of(name, function, wrapper=False):
    """A plugin `mine` whose only hook calls `function` with the hook's arguments; its active composition."""
    arguments = ", ".join(inspect.signature(getattr(hooks, name)).parameters)
    inner, first = ("    inner = yield\n", f"inner, {arguments}") if wrapper else ("", arguments)
    text = f"def hook(self, {arguments}):\n{inner}    return function({first})"
    space = {"function": function}
    exec(text, space)
    mine = type("Mine", (Plugin,), {name: hookimpl(wrapper=wrapper)(space["hook"])})(Plugin.Config())
    mine.name = "mine"
    others = ACTIVE.plugins.items()
    return register({**{n: p for n, p in others if wrapper or KINDS[name] != "one" or _shares(p, name)}, "mine": mine})


def _shares(plugin, name):
    """Whether a plugin may stay beside another owner of the hook."""
    mark = getattr(getattr(type(plugin), name, None), "grpozoo_impl", None)
    return mark is None or mark["trylast"]


def ask(name, function, wrapper=False, **changed):
    """Call the hook with arguments of the worked example."""
    caller = getattr(hook_of(name, function, wrapper).hooks, name)
    given = {**ARGUMENTS, "metrics": {}, **changed}
    return caller(**{argument: given[argument] for argument in caller.spec.argnames})


def answering(value):
    return lambda *_: value


def test_every_hook_says_what_it_expects():
    assert EXPECTED.keys() == KINDS.keys()


def fail(*_):
    return {}["nothing"]


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("wrapper", [False, True])
def test_an_exception_names_plugin_hook_error_and_place_and_keeps_its_cause(name, wrapper):
    if name == "reward":
        pytest.skip("asked by grpozoo.rewards.score: test_score.py")
    if wrapper and name in ("generate", "select_parameters"):
        pytest.skip("what they wrap needs a model")
    pattern = rf"^plugins\.mine: {name}\(\) raised KeyError\('nothing'\)\nat .*test_hook_calls\.py:\d+$"
    with pytest.raises(UserError, match=pattern) as error:
        ask(name, fail, wrapper)
    assert isinstance(error.value.__cause__, KeyError)


def test_a_users_error_and_an_interruption_pass_unchanged_and_an_exit_does_not_end_the_run():
    def raising(error):
        def function(*_):
            raise error

        return function

    with pytest.raises(UserError, match="^say it once$"):
        ask("advantage", raising(UserError("say it once")))
    with pytest.raises(KeyboardInterrupt):
        ask("advantage", raising(KeyboardInterrupt()))
    with pytest.raises(UserError, match=r"plugins\.mine: advantage\(\) raised SystemExit\(3\)"):
        ask("advantage", raising(SystemExit(3)))


def other_order(rows):
    return GENERATED.select(rows)


def reward(total):
    return replace(STEP.rewards, total=total)


PARAMETER = torch.nn.Parameter(torch.zeros(2))
WRONG = [  # hook, answer, what came, what is expected
    ("validate", 3, "3 (int)", "a notice to print"),
    ("setup", 3, "3 (int)", "nothing"),
    ("select_parameters", PARAMETER, "a tensor (2,) of float32", "a list of optimizer groups"),
    ("select_parameters", [[PARAMETER]], "a group that is a value of type list of 1", '{"params": [parameter, ...]'),
    ("select_parameters", [{"parameters": [PARAMETER]}], "a group with the keys parameters", '"params"'),
    ("select_parameters", [{"params": iter([PARAMETER])}], '"params" that is a value of type list_iterator', '"params"'),
    ("select_parameters", [{"params": ["w"]}], "\"params\" with 'w' (str)", '"params"'),
    ("select_parameters", [{"params": [torch.zeros(2)]}], "a parameter without requires_grad", "requires_grad_(True)"),
    ("select_parameters", [{"params": [PARAMETER], "lr_scale": NAN}], '"lr_scale" that is nan', "a finite factor"),
    ("token_sampler", Plugin, "the class Plugin", "grpozoo.sampling.TokenSampler"),
    ("prepare_prompts", "p0", "'p0' (str)", "a list of grpozoo.Prompt"),
    ("prepare_prompts", [], "no prompt at all", "one grpozoo.Prompt at least"),
    ("prepare_prompts", ["p0"], "a list with 'p0' (str)", "a list of grpozoo.Prompt"),
    ("generate", ["text"], "a value of type list of 1", "grpozoo.Rollouts"),
    ("generate", other_order([0, 1]), "2 rows", "4 rows, one for each sample id"),
    ("generate", other_order([0, 2, 1, 3]), "('train', 1, 0) in row 1, where ('train', 0, 1)", "in the order"),
    ("generate", replace(GENERATED, text=("x",)), "1 rows in text beside 4 prompts", "one row per completion"),
    ("generate", replace(GENERATED, completion_mask=GENERATED.logprobs), "completion_mask: a tensor", "of bool"),
    ("generate", replace(GENERATED, logprobs=GENERATED.logprobs[:, :1]), "logprobs: a tensor (4, 1)", "the shape of"),
    ("generate", replace(GENERATED, logprobs=GENERATED.logprobs * NAN), "not finite for prompt 'p0', sample 0", "finite"),
    ("transform_rewards", STEP.rewards.total, "a tensor (8,) of float64", "grpozoo.Rewards"),
    ("transform_rewards", reward(None), "Rewards whose total is a value of type NoneType", "a total for each row"),
    ("transform_rewards", reward(torch.zeros(3)), "Rewards whose total is a tensor (3,)", "a tensor (8,) of float64"),
    ("resample", STEP.rollouts, "a value of type Rollouts", "the pair (Rollouts, Rewards)"),
    ("resample", (STEP.rollouts, STEP.rewards.select([0])), "whose total is a tensor (1,)", "a total for each row"),
    ("resample", (STEP.rollouts.select([]), STEP.rewards.select([])), "no row at all", "one row at least"),
    ("resample", (STEP.rollouts.select([0, 0]), STEP.rewards.select([0, 0])), "('train', 0, 0) twice", "each of them"),
    ("token_rewards", [0.0] * 8, "a value of type list of 8", "a tensor (8, 5)"),
    ("token_rewards", torch.zeros(8), "a tensor (8,) of float32", "a tensor (8, 5)"),
    ("advantage", [0.0] * 8, "a value of type list of 8", "one number per row (8,) or token (8, 5)"),
    ("advantage", torch.zeros(5), "a tensor (5,) of float32", "one number per row (8,) or token (8, 5)"),
    ("before_update", STEP.batch.advantages, "a tensor (8, 5) of float64", "nothing"),
    ("minibatch", torch.zeros(8, 5), "a tensor (8, 5) of float32", "a dictionary {name: tensor (8, 5)}"),
    ("minibatch", {"x": torch.zeros(8)}, "'x': a tensor (8,)", "one number per token"),
    ("policy_loss", 0.0, "0.0 (float)", "per token (8, 5) or per sequence (8, 1)"),
    ("policy_loss", torch.zeros(()), "a tensor () of float32", "per token (8, 5) or per sequence (8, 1)"),
    ("aggregation", "token_maen", "'token_maen' (str)", "did you mean 'token_mean'?"),
    ("token_weights", torch.zeros(5), "a tensor (5,) of float32", "per token (8, 5) or per sequence (8, 1) or None"),
    ("regularizer", (torch.zeros(8, 5), "mean"), "'mean' (str)", "one of seq_mean"),
    ("regularizer", torch.zeros(8), "a tensor (8,) of float32", "per token (8, 5)"),
    ("after_step", {"x": 1.0}, "a value of type dict of 1", "nothing"),
    ("evaluate", 0.5, "0.5 (float)", "a dictionary {name: number}"),
    ("evaluate", {"x": "high"}, "'x': 'high' (str)", "one number for each name"),
    ("evaluate", {"x": torch.zeros(2)}, "'x': a tensor (2,)", "one number for each name"),
]  # fmt: skip


@pytest.mark.parametrize("name, answer, came, expected", WRONG, ids=[f"{row[0]}-{row[2]}" for row in WRONG])
def test_a_wrong_answer_names_plugin_hook_what_came_and_what_is_expected(name, answer, came, expected):
    with pytest.raises(UserError) as error:
        ask(name, answering(answer))
    first, second = str(error.value).splitlines()
    assert first.startswith(f"plugins.mine: {name}() answered ") and came in first
    assert second.startswith("expected: ") and expected in second


def test_what_is_written_into_the_metrics_is_looked_at_too():
    def write(step, metrics, run):
        metrics["mine/x"] = "high"

    with pytest.raises(UserError, match=r"plugins\.mine: after_step\(\) answered metrics\['mine/x'\] = 'high' \(str\)"):
        ask("after_step", write)


def test_rewards_of_tokens_are_finite_inside_the_mask_and_anything_outside():
    values = torch.zeros(8, 5).masked_fill(~MASK, NAN)
    assert ask("token_rewards", answering(values))[0] is values
    row, token = 2, 1
    for bad in (NAN, INF):
        wrong = values.clone()
        wrong[row, token] = bad
        pattern = rf"token_rewards\(\) answered {bad} for token 1 of prompt 'p0', sample 2\nexpected: .* finite number per token"
        with pytest.raises(UserError, match=pattern):
            ask("token_rewards", answering(wrong))


def total_with(value, *rows):
    def change(inner, *_):
        total = inner.total.clone()
        total[list(rows)] = value
        return replace(inner, total=total)

    return change


def test_a_total_is_finite_and_nan_only_where_a_reward_was_missing():
    for bad in (NAN, INF, -INF):
        pattern = rf"plugins\.mine: transform_rewards\(\) answered the total {bad} for prompt 'p1', sample 1\n"
        with pytest.raises(UserError, match=pattern):
            ask("transform_rewards", total_with(bad, 5), wrapper=True)
    missing = replace(
        STEP.rewards, components={"answer": STEP.rewards.total.clone().index_fill(0, torch.tensor(5), NAN)}
    )
    answer = ask("transform_rewards", total_with(NAN, 5), wrapper=True, rewards=missing)
    assert answer.total.isnan().tolist() == [row == 5 for row in range(8)]


def test_an_advantage_is_finite_where_there_is_a_reward():
    advantages = torch.ones(8).index_fill(0, torch.tensor(5), NAN)
    with pytest.raises(
        UserError, match=r"plugins\.mine: advantage\(\) answered .*not finite for prompt 'p1', sample 1"
    ):
        ask("advantage", answering(advantages))
    total = STEP.rewards.total.clone().index_fill(0, torch.tensor(5), NAN)
    assert ask("advantage", answering(advantages), rewards=replace(STEP.rewards, total=total)) is advantages


def change_version(rollouts, *_):
    rollouts.completion_ids.add_(1)


def change_array(rollouts, *_):
    rollouts.logprobs.numpy()[0, 0] = -9.0


def change_extra(rollouts, *_):
    rollouts.prompts[0].extra["seen"] = True


@pytest.mark.parametrize("change, where", [
    (change_version, r"rollouts\.completion_ids"),
    (change_array, r"rollouts\.logprobs"),
    (change_extra, r"rollouts\.prompts\[0\]\.extra\['seen'\]"),
])  # fmt: skip
@pytest.mark.parametrize("wrapper", [False, True])
def test_a_change_in_place_names_plugin_hook_and_place(change, where, wrapper):
    def function(*arguments):
        change(*(arguments[1:] if wrapper else arguments))
        return arguments[0] if wrapper else None

    with pytest.raises(UserError, match=rf"plugins\.mine: advantage\(\) changed {where} in place"):
        ask("advantage", function, wrapper, rollouts=fixture().rollouts)


def test_a_change_of_a_tensor_is_noticed_in_every_call_and_the_plugin_may_change_what_it_made():
    late = []

    def function(rollouts, rewards, run):
        late.append(1)
        if len(late) == 9:
            rewards.total.mul_(2)
        return rewards.total.clone().mul_(2)

    active, step = hook_of("advantage", function), fixture()
    for _ in range(8):
        active.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None)
    with pytest.raises(UserError, match=r"plugins\.mine: advantage\(\) changed rewards\.total in place"):
        active.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None)


def test_a_wrapper_returns_and_yields_once():
    def hook(body):
        cls = type("Mine", (Plugin,), {"advantage": hookimpl(wrapper=True)(body)})
        active = register({**ACTIVE.plugins, "mine": cls(cls.Config())})
        return active.hooks.advantage(rollouts=STEP.rollouts, rewards=STEP.rewards, run=None)

    def silent(self):
        yield

    def twice(self):
        yield (yield)

    def never(self):
        if self is None:
            yield

    for body, message in ((silent, "answered None"), (twice, "has a second yield"), (never, "ended without a yield")):
        with pytest.raises(UserError, match=rf"plugins\.mine: advantage\(\) {message}\nexpected: a wrapper"):
            hook(body)


def test_an_error_inside_passes_wrappers_and_keeps_the_name_of_who_raised_it():
    seen = []

    def outer(self):
        try:
            return (yield)
        finally:
            seen.append("tidied up")

    cls = type("Outer", (Plugin,), {"advantage": hookimpl(wrapper=True)(outer)})
    active = hook_of("advantage", fail)
    active = register({**active.plugins, "outer": cls(cls.Config())})
    with pytest.raises(UserError, match=r"^plugins\.mine: advantage\(\) raised KeyError"):
        active.hooks.advantage(rollouts=STEP.rollouts, rewards=STEP.rewards, run=None)
    assert seen == ["tidied up"]


def test_a_hook_that_everybody_leaves_to_others_is_told():
    with pytest.raises(UserError, match=r"policy_loss\(\): everybody answered None \(mine\)"):
        cls = type("Mine", (Plugin,), {"policy_loss": hookimpl(lambda self, batch: None)})
        without = {name: plugin for name, plugin in ACTIVE.plugins.items() if name != "grpo"}
        answers = {"advantage": lambda self: None, "aggregation": lambda self: None}
        rest = type("Rest", (Plugin,), {name: hookimpl(function) for name, function in answers.items()})
        active = register({**without, "mine": cls(cls.Config()), "rest": rest(rest.Config())})
        active.hooks.policy_loss(batch=STEP.batch, out=STEP.out)


def test_a_table_that_is_given_twice_names_who_answers_the_hook():
    def table(self, batch):
        return {"x": batch.advantages}

    plugins = {}
    for name in ("one", "two"):
        cls = type("Table", (Plugin,), {"minibatch": hookimpl(table)})
        plugins[name] = cls(cls.Config())
    active = register({**ACTIVE.plugins, **plugins})
    with pytest.raises(UserError, match=r"the table 'x' is given twice; plugins that answer this hook: one, two"):
        minibatch_tables(active.hooks, STEP.batch, STEP.out, None, len(STEP.rollouts))


def test_a_state_that_raises_names_the_plugin():
    class Mine(Plugin):
        def state_dict(self):
            return {"mean": self.mean}

    pattern = r"plugins\.mine: state_dict\(\) raised AttributeError\(.*'mean'.*\)\nat .*test_hook_calls\.py:\d+"
    with pytest.raises(UserError, match=pattern):
        plugin_states({"mine": Mine(Mine.Config())})


def test_the_defaults_answer_what_is_expected():
    defaults, step = Defaults(Defaults.Config()), fixture()
    EXPECTED["transform_rewards"](
        defaults.transform_rewards(step.rollouts, step.rewards),
        rollouts=step.rollouts,
        rewards=step.rewards,
        inner=None,
    )
    EXPECTED["resample"](defaults.resample(step.rollouts, step.rewards))


def test_rows_of_no_engine_and_of_one_are_the_rows_of_one():
    """A process without requests answers no rows, and they change nothing beside the others."""
    empty = GENERATED.select([])
    joined = concatenate([empty, GENERATED])
    assert len(joined) == len(GENERATED) and torch.equal(joined.completion_ids, GENERATED.completion_ids)
