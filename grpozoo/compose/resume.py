"""What may differ between the parts of a resumed run: keys, code, packages; and who must agree to run code.

A key may change if it does not enter the mathematics of training. Data and model are recognised by what they are, not
by where they lie: the fingerprint of the prompts and the hashes in the checkpoint (grpozoo.run.state) say so.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpozoo.compose import environment
from grpozoo.compose.registry import installed, load_class
from grpozoo.compose.settings import FREE, Settings, comparable
from grpozoo.compose.task import TASKS
from grpozoo.config import Schedule
from grpozoo.errors import UserError

MAY_CHANGE = frozenset({  # keys, and sections for all that is below them
    *FREE,  # where a run writes
    "eval",  # evaluation changes no bit of training
    "max_prompt_length", "reward_timeout",  # bounds: to cross one is an error, and where it lies changes no number
    "model.path", "model.trust_remote_code", "model.allow_pickle",  # how the model is found
})  # fmt: skip
BUT = frozenset({"eval.correct"})  # methods may take it for what is right
ROUNDING = frozenset({  # the same mathematics in another order: the last bits differ from here on
    "update.tokens_per_micro_batch", "update.activation_memory_mb", "update.logits_chunk", "update.shared_prefix",
    "update.prefix_cache", "update.gradient_checkpointing", "model.attention",
})  # fmt: skip
CORE_CODE = ("model.trust_remote_code", "model.allow_pickle")  # keys of the core that run somebody's code


def goes_on_with(composed: DictConfig, overrides: list[str], checkpoint: Path) -> DictConfig:
    """The configuration of a run that is resumed.

    `resume=FOLDER` alone, or with keys that may change, takes the run's own; with other keys the whole command must
    say the same. What runs code must stand on the command line again.
    """
    saved = _saved(checkpoint / "config.yaml")
    environment.check_consent(saved, composed)
    chosen = saved.copy()
    keys = [override.lstrip("+~").split("=")[0] for override in overrides]
    again = code_keys(saved).keys() | environment.variables(saved).keys()  # said once more, with the same words
    if all(may_change(key, saved) or key in again or key == "steps" for key in keys):
        with open_dict(chosen):
            for key in keys:
                OmegaConf.update(chosen, key, environment.raw(composed, key))
            chosen.resume_changed = composed.resume_changed  # a consent is given once
    else:
        chosen = composed
    check_resumable(saved, chosen)
    check_consent(chosen, composed, checkpoint)
    return chosen


def _saved(file: Path) -> DictConfig:
    """The configuration of the run, which may be anybody's file."""
    try:
        config = OmegaConf.load(file)
    except (OSError, YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"resume: {file} cannot be read: {reason}") from None
    missing = [name for name in ("plugins", "task", "optim") if not isinstance(_section(config, name), DictConfig)]
    if missing:
        raise UserError(f"resume: {file} is not the configuration of a run: it has no section {missing[0]}")
    return config


def _section(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, DictConfig) else None


def check_resumable(saved: DictConfig, composed: DictConfig) -> None:
    """Refuse to go on with another configuration than the run was started with."""
    before, now = comparable(saved), comparable(composed)
    differing = [key for key in _differing(before, now) if not may_change(key, saved) or not may_change(key, composed)]
    if differing:
        shown = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in differing[:4])
        steps = ", steps" if str(saved.optim.schedule) == Schedule.constant.name else ""
        raise UserError(
            f"the run was started with another configuration ({len(differing)} keys differ, which decide what is learned)\n"
            f"{shown}\nmay change: {', '.join(sorted(MAY_CHANGE | ROUNDING | _places(saved)))}{steps}, but not {', '.join(BUT)}\n"
            "resume it with resume=RUN_FOLDER alone or with those, or start a new run"
        )


def may_change(key: str, composed: DictConfig) -> bool:
    """Whether a resumed run may set this key (or all of this section) to another value."""
    allowed = MAY_CHANGE | ROUNDING | _places(composed)
    parts = key.split(".")
    return key not in BUT and any(".".join(parts[:n]) in allowed for n in range(1, len(parts) + 1))


def _places(composed: DictConfig) -> frozenset[str]:
    """Options of the task that only say where its data lie."""
    kind = OmegaConf.select(composed, "task.kind")
    if kind not in installed(TASKS):
        return frozenset()
    return frozenset(f"task.{option}" for option in load_class(str(kind), TASKS).places)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


# --- consent ------------------------------------------------------------------------------------------------------


def code_keys(composed: DictConfig) -> dict[str, Any]:
    """Key -> value of everything in a configuration that names code to run: the core's, and what plugins declare."""
    found = {key: OmegaConf.select(composed, key) for key in CORE_CODE}
    entries = installed()
    for name in composed.get("plugins") or {}:
        if name in entries:
            options = getattr(load_class(str(name), found=entries), "code_options", ())
            found |= {
                f"plugins.{name}.{option}": OmegaConf.select(
                    composed, f"plugins.{name}.{option}", throw_on_missing=False
                )
                for option in options
            }
    return {key: value for key, value in found.items() if value}


def consent_words(composed: DictConfig) -> list[str]:
    """What must stand beside resume=FOLDER on the command line, as a shell reads it."""
    return [_word(key, value) for key, value in code_keys(composed).items()]


def check_consent(chosen: DictConfig, composed: DictConfig, checkpoint: Path) -> None:
    """A configuration out of a folder must not run code that this user's own command does not name."""
    asked = code_keys(composed)
    missing = {key: value for key, value in code_keys(chosen).items() if asked.get(key) != value}
    if missing:
        words = " ".join(_word(key, value) for key, value in missing.items())
        model = f" (the code of {chosen.model.path})" if any(key in CORE_CODE for key in missing) else ""
        raise UserError(
            f"the configuration of {checkpoint} runs code: {', '.join(missing)}{model}\n"
            f"if you trust it, say so on the command line, beside resume=: {words}"
        )


def _word(key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not re.fullmatch(r"[\w./:@%?-]+", text):  # more than Hydra reads without quotes
        text = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return shlex.quote(f"{'+' if key.startswith('plugins.') else ''}{key}={text}")


# --- what the run was made of ----------------------------------------------------------------------------------------


def compare(checkpoint: Path, settings: Settings) -> list[str]:
    """Notices of what rounds differently than before; UserError for code that is not what the run was started with."""
    notices = []
    before = comparable(OmegaConf.load(checkpoint / "config.yaml"))
    if keys := [key for key in _differing(before, comparable(settings.composed)) if key in ROUNDING]:
        notices.append(f"{', '.join(keys)} changed: the same mathematics, but other last bits from here on")
    try:
        saved = json.loads((checkpoint / "manifest.json").read_text())
    except FileNotFoundError:
        return notices  # saved by a version that did not note it
    now = settings.manifest()
    before, after = sources(saved), sources(now)
    changed = [name for name in after if before.get(name, after[name]) != after[name]]
    if changed and not settings.config.resume_changed:
        files = [file for row in now["plugins"].values() for file in row["files"]]
        raise UserError(
            f"not the code that {checkpoint} was trained with: {', '.join(changed)}\n"
            f"compared: the source of plugins and tasks{', '.join(['', *files])}\n"
            "restore it, or start a new run; to go on with the code as it is now: resume_changed=true"
        )
    notices += [f"resume_changed=true: goes on with the changed {name}" for name in changed]
    packages = [
        f"{name} {old} then, {now['versions'][name]} now"
        for name, old in saved["versions"].items()
        if now["versions"].get(name, old) != old
    ]
    return notices + ([f"packages differ from the start of the run: {'; '.join(packages)}"] if packages else [])


def sources(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """What holds code -> the hashes of it, from a manifest. A file is what it holds, wherever it lies."""
    found = {f"task {manifest['data']['kind']!r}": [manifest["data"]["sha256"]]}
    for name, row in manifest["plugins"].items():
        found[f"plugin {name!r}"] = [row["sha256"], *sorted(row["files"].values())]
    return found
