"""`check_plugin`: the properties that every plugin must have, as one table."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from grpozoo.calls.guard import place
from grpozoo.errors import UserError
from grpozoo.testing import options, pieces, processes, steps
from grpozoo.testing.example import Fixture
from grpozoo.testing.subject import ConformanceError, Subject

TENSORS = frozenset({"advantage", "policy_loss", "token_weights", "regularizer", "before_update", "aggregation"})
GROUPS = frozenset({"advantage"})
PARTS = frozenset({"generate", "token_sampler", "reward", "policy_loss", "token_weights", "regularizer"})  # see a part
CALLERS = frozenset({"transform_rewards", "resample"})  # ask the run for more, in every process


@dataclass(frozen=True)
class Check:
    """One property; it runs if the plugin implements one of `hooks` (null: always)."""

    name: str
    run: Callable[[Subject], None]
    hooks: frozenset[str] | None
    reason: str


def _check(name: str, run: Callable[[Subject], None], hooks: Collection[str] | None, reason: str) -> Check:
    return Check(name, run, None if hooks is None else frozenset(hooks), reason)


CHECKS = (
    _check(
        "composes", options.check_composes, None, "a plugin that fails to load must say so before a model is loaded"
    ),
    _check("kinds", pieces.check_kinds, None, "of two plugins that replace the same thing one would vanish in silence"),
    _check("needs", options.check_needs, None, "the core computes only what is asked for by its exact name"),
    _check("yaml", options.check_yaml, None, "the printed configuration must show what runs"),
    _check(
        "unknown option",
        options.check_unknown_option,
        None,
        "a misspelt option that is accepted is an experiment not done",
    ),
    _check("options are read", options.check_options_are_read, None, "an option that is accepted and ignored misleads"),
    _check(
        "inputs",
        steps.check_inputs,
        TENSORS | {"transform_rewards"},
        "the next hook would see other data, in an order nobody chose",
    ),
    _check(
        "row order", steps.check_row_order, TENSORS, "rows are known by id: groups identified by position mix prompts"
    ),
    _check("padding", steps.check_padding, TENSORS, "the width of a batch is an accident of its longest row"),
    _check(
        "garbage",
        steps.check_garbage,
        TENSORS,
        "masked log-probabilities may be anything: select by the mask, do not multiply",
    ),
    _check("group ids", steps.check_group_ids, TENSORS, "a group id is a name, not a position"),
    _check("mask", steps.check_mask, TENSORS, "training on padding, or 0/0 in an empty batch, destroys a run"),
    _check(
        "micro-batches", steps.check_micro_batches, TENSORS, "how rows are split for memory must not change the update"
    ),
    _check(
        "zero advantage",
        steps.check_zero_advantage,
        TENSORS,
        "the core leaves out rows that cannot change the gradient",
    ),
    _check(
        "equal rewards",
        steps.check_equal_rewards,
        GROUPS,
        "rounding noise divided by its own spread is a large advantage",
    ),
    _check("singleton", steps.check_singleton, GROUPS, "a row without siblings has no baseline: n - 1 is 0"),
    _check(
        "missing rewards",
        steps.check_missing_rewards,
        GROUPS,
        "a row without a reward, counted as 0, biases its siblings",
    ),
    _check("transform", steps.check_transform, {"transform_rewards"}, "rewards belong to rows"),
    _check("resample", steps.check_resample, {"resample"}, "rewards belong to rows, and rows to requests"),
    _check(
        "reward", pieces.check_reward, {"reward"}, "one number per completion, or None; nothing else can be averaged"
    ),
    _check("prompts", pieces.check_prompts, {"prepare_prompts"}, "prompts are shared by every step that draws them"),
    _check(
        "parameters",
        pieces.check_parameters,
        {"select_parameters"},
        "the optimizer must hold exactly what has a gradient",
    ),
    _check(
        "law",
        pieces.check_sampler_law,
        {"token_sampler"},
        "the ratio assumes that every completion follows the policy's law",
    ),
    _check(
        "calls",
        pieces.check_sampler_calls,
        {"token_sampler"},
        "batching and the number of processes must not change completions",
    ),
    _check(
        "engine", pieces.check_engine, {"generate"}, "log-probabilities of another law or another row make wrong ratios"
    ),
    _check(
        "processes",
        processes.check_processes,
        PARTS | CALLERS,
        "what a plugin notes about rows stays on the process that saw them, and the others train on something else",
    ),
    _check("evaluate", pieces.check_evaluate, {"evaluate"}, "evaluation must not change training"),
    _check("state", options.check_state, None, "a resumed run must continue as if it had not stopped"),
    _check(
        "metrics", options.check_metrics, None, "a number without unit and meaning is noise"
    ),  # last: sees what was logged
)


def check_plugin(name: str, *overrides: str, skip: Collection[str] = (), step: Fixture | None = None) -> list[str]:
    """Run every check that applies to a plugin; returns their names, raises ConformanceError listing all that fail.

    overrides: the command line that switches it on, e.g. "algo=mine"; none: its config file. skip: names of checks
    that the method cannot pass by its nature (a batch-wide baseline and "equal rewards"). step: a step to check on
    instead of `example()`, for plugins that read something special from rollouts or rewards.
    """
    unknown = set(skip) - {check.name for check in CHECKS}
    if unknown:
        raise ValueError(f"no check is named {', '.join(sorted(unknown))}: {', '.join(check.name for check in CHECKS)}")
    subject = Subject(name, overrides or tuple(options.overrides_for(name)), step)
    done, failures = [], []
    told: dict[str, str] = {}  # message -> the check that found it first
    for check in CHECKS:
        if check.name in skip or (check.hooks is not None and not check.hooks & subject.answers):
            continue
        message = failure(check, subject)
        if message is None:
            done.append(check.name)
            continue
        first = told.setdefault(message, check.name)  # a hook that raises fails many checks with one message
        message = message.replace("\n", "\n    ") if first == check.name else f"as in {first!r}"
        failures.append(f"plugin {name!r} fails {check.name!r}: {message}\n    because {check.reason}")
        if check.name == "composes":
            break
    if failures:
        raise ConformanceError("\n".join(failures))
    return done


def failure(check: Check, subject: Subject) -> str | None:
    """What is broken, or None. Hooks name themselves when they raise; anything else is told with its place."""
    try:
        check.run(subject)
    except (ConformanceError, UserError) as error:
        return str(error)
    except Exception as error:
        return f"the check ended with {error!r:.300}\nat {place(error)}"
    return None
