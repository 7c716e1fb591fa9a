"""The extension contract: every hook in loop order, and the base class of plugins. This is all a method may touch.

Kinds of hooks, and what the core does with the answers:
    one       the first plugin that answers wins; two plugins that replace the same hook are refused at start-up
    chain     wrappers (`hookimpl(wrapper=True)`): each changes the result of those listed before it
    multiply  factors, None counts as 1          sum      terms, None counts as 0
    collect   dictionaries are merged, equal keys are refused          all      everybody is called
A plugin names only the arguments that it uses; specifications gain arguments and never lose or rename them. What each
hook must answer is checked in every call (grpozoo.calls.answers); a failure names plugin, hook and what is expected.
`run` (grpozoo.run.run.Run) is the context: config, step, task, policies, and prompts(), generate(), given(), score(),
measure(), verdicts(), stream().
"""

from dataclasses import dataclass, field
from typing import Any

import pluggy

HOOK_VERSION = 1  # grows when a hook changes its meaning; a plugin states the one it was written for

hookimpl = pluggy.HookimplMarker("grpozoo")
_hookspec = pluggy.HookspecMarker("grpozoo")
KINDS: dict[str, str] = {}  # hook name -> kind
# fmt: off
NEEDS = frozenset({
    "old_logprobs",  # Rollouts.old_logprobs before the first update, also when a batch is used for one update
    "ref_logprobs",  # of the reference: the policy at the start of the run, unless a plugin refreshes it
    "entropy",  # Rollouts.entropy before the update and Output.entropy with gradient
    "all_rows",  # rows whose advantage is zero take part in the update (a regularizer acts on them too)
})
# fmt: on


def may_be_infinite(default: float) -> Any:
    """The default of an option that has a meaning at infinity (`refresh_bits: float = may_be_infinite(12.0)`); others are finite."""
    return field(default=default, metadata={"finite": False})


class Plugin:
    """One method: options, needs, hooks, state. Subclass, implement hooks with `@hookimpl`, register by entry point."""

    name = ""  # the entry-point name; set when the plugin is created
    needs: frozenset[str] = frozenset()  # subset of NEEDS; may be set from the options in __init__
    metrics: dict[str, str] = {}  # name of each value it logs -> "unit: meaning"
    order: int = 0  # among wrappers of one hook the lower is applied first, equal ones by name
    controls: frozenset[str] = (
        frozenset()
    )  # quantities that it steers, e.g. "entropy"; two that steer the same are refused
    conflicts: dict[str, str] = {}  # plugin that it does not stack with -> why
    code_options: frozenset[str] = frozenset()  # options that name code to run: a resumed run asks for them again
    options_for: dict[str, tuple[str, ...]] = {}  # hook -> options that only it reads: refused when another answers it
    hook_version = HOOK_VERSION

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any):
        self.config = config
        self.logged: list[tuple[str, float, float]] = []  # (name, value, weight), emptied by the core

    def log(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record `NAME/name`; within a step and over processes values are averaged by `weight` (a count)."""
        self.logged.append((f"{self.name}/{name}", float(value), float(weight)))

    def files(self) -> list[str]:
        """Files besides the plugin's own module that decide what it computes; a resumed run must find them unchanged."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must find again: numbers, text, tensors, numpy's values, dates, and lists, dicts, sets of them.

        Values of classes of your own are refused when the run starts or saves: save what they are made of.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


def hook(kind: str):
    """Declare a hook of the given kind."""

    def mark(function):
        KINDS[function.__name__] = kind
        return _hookspec(firstresult=kind in ("one", "chain"))(function)

    return mark


@hook("all")
def validate(config, active):
    """Refuse contradictory settings (raise UserError) or return a notice to print. No model yet; active: all plugins."""


@hook("all")
def setup(run):
    """The policy is loaded, nothing is restored yet: build what the method owns (a critic, its optimizer)."""


@hook("one")
def select_parameters(policy):
    """Which parameters train: a list of optimizer groups {"params": [...], "lr_scale": 1.0}. Sets requires_grad."""


@hook("one")
def token_sampler(run):
    """The grpozoo.sampling.TokenSampler that chooses each next token."""


@hook("chain")
def prepare_prompts(prompts, run):
    """list[Prompt] of a step -> list[Prompt]: hints, another format, another instruction."""


@hook("one")
def generate(requests, sampler, law, policy, run):
    """The engine: list[Request], [] too, -> Rollouts in the order of the requests, sampled by `sampler` under `law`."""


@hook("collect")
def reward(rollouts, run):
    """{name: [R] numbers, NaN or None = no answer} or {name: R matrices [m, d]}; may be `async`. Main process only."""


@hook("chain")
def transform_rewards(rollouts, rewards, run):
    """Rewards -> Rewards: shaping that sees whole groups."""


@hook("chain")
def resample(rollouts, rewards, run):
    """(Rollouts, Rewards) -> (Rollouts, Rewards): drop, replace or add rows once rewards are known."""


@hook("sum")
def token_rewards(rollouts, run):
    """[R, T] rewards of single tokens (a KL penalty); summed over a row they are added to its total reward."""


@hook("one")
def advantage(rollouts, rewards, run):
    """[R] or [R, T] float: the advantage of each row or token. Groups are equal group_id, in any order and size."""


@hook("all")
def before_update(rollouts, rewards, advantages, run):
    """Statistics of the whole step, all processes included, before its first update. advantages: [R, T]."""


@hook("collect")
def minibatch(batch, out, run):
    """{name: [n, T]} from all n rows of an optimizer step, current policy, no gradient; arrives as Batch.tables."""


@hook("one")
def policy_loss(batch, out):
    """The surrogate to minimise: [r, T] per token or [r, 1] per sequence. Must be 0 where the advantage is 0."""


@hook("one")
def aggregation():
    """How losses become a scalar: a name in grpozoo.ops.AGGREGATIONS."""


@hook("multiply")
def token_weights(batch, out):
    """[r, T] or [r, 1] factors of the policy loss."""


@hook("sum")
def regularizer(batch, out):
    """[r, T] terms added after the weights, or (terms, aggregation) to be summed by another rule. Needs "all_rows"."""


@hook("all")
def after_step(step, metrics, run):
    """The step is over; `metrics` (name -> float) may be added to."""


@hook("collect")
def evaluate(rollouts, rewards, run):
    """{name: float} from held-out completions and their rewards; must not change what training does."""
