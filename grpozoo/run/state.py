"""What a run keeps on disk: the manifest, and checkpoints from which it goes on bit for bit.

A checkpoint holds the model in Hugging Face format (`model/`), and in `trainer.pt` plain tensors, numbers and lists:
optimizer, counters, data position, plugin state, the unfinished cycle of rollouts, positions of the metric files.
Where only some parameters train, `trained.safetensors` takes the place of `model/`: those parameters alone. The others
are those that the run started from; a hash of them makes sure that a resumed run finds the same.
Random streams need no saving: they are named by what they are for (grpozoo.rng).
"""

import hashlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from grpozoo.calls.guard import blamed
from grpozoo.cycle import Cycle
from grpozoo.errors import UserError
from grpozoo.hooks import Plugin
from grpozoo.models import files as models
from grpozoo.run.plain import packed, unpacked
from grpozoo.storage import write_json, write_text
from grpozoo.types import Prompt, Rewards, Rollouts


def write_manifest(run, finished: bool = False) -> None:
    """manifest.json and config.yaml of the run folder; `finished` keeps resume=auto away from a run that is done."""
    if run.accelerator.is_main_process:
        write_text(run.run_dir / "config.yaml", run.settings.yaml())
        write_json(
            run.run_dir / "manifest.json", run.settings.manifest() | {"processes": run.world, "finished": finished}
        )


def save(run) -> None:
    """A checkpoint of this moment, atomic; called by every process, written by the main one."""
    check_finite(run)
    if run.accelerator.is_main_process:
        accuracy = run.tracker.value("heldout/accuracy", run.step)
        try:
            run.store.save(run.step, lambda folder: _write(run, folder), accuracy)
        except OSError as error:
            raise UserError(
                f"step {run.step}: no checkpoint could be written to {run.store.folder}: {error.strerror or error}\n"
                f"earlier ones are whole; make room, then go on with resume={run.run_dir}"
            ) from None
    run.accelerator.wait_for_everyone()


def check_finite(run) -> None:
    """Refuse to save what no run can go on from: it would push good checkpoints out."""
    moments = run.optimizer.state
    for name, value in parts(run)[0].items():
        held = {"weights": value, **{key: v for key, v in moments.get(value, {}).items() if torch.is_tensor(v)}}
        for kind, tensor in held.items():
            if not bool(tensor.isfinite().all()):
                last = run.store.latest(log=lambda message: None)
                raise UserError(
                    f"step {run.step}: {name} is not finite any more ({kind}): nothing was saved\n"
                    f"the last good checkpoint is {last}: start a new run with a smaller lr or optim.max_grad_norm"
                    if last
                    else f"step {run.step}: {name} is not finite any more ({kind}), and no checkpoint was saved before\n"
                    "start again with a smaller lr or optim.max_grad_norm, and checkpoint.every steps apart"
                )


def _write(run, folder: Path) -> None:
    trained, frozen = parts(run)
    if frozen:
        save_file(
            {name: value.detach().contiguous() for name, value in trained.items()}, folder / "trained.safetensors"
        )
    else:
        models.save(run.policy.model, run.policy.tokenizer, folder / "model")
    write_text(folder / "config.yaml", run.settings.yaml())
    write_json(folder / "manifest.json", run.settings.manifest())
    state = {
        "fingerprint": run.task.fingerprint(),
        "step": run.step,
        "updates": run.updates,
        "optimizer": packed(run.optimizer.state_dict(), "the optimizer's state"),
        "trained": _selection(trained),
        "frozen": run.frozen,
        "origin": run.origin,
        "data": run.data.state_dict(),
        "plugins": plugin_states(run.plugins),
        "cycle": pack_cycle(run.cycle),
        "tracker": run.tracker.position(),
    }
    torch.save(state, folder / "trainer.pt")
    _read(folder)  # what cannot be read must not be sealed


def plugin_states(plugins: dict[str, Plugin]) -> dict[str, Any]:
    """What each plugin must find again, as a checkpoint holds it; UserError names the plugin and the key."""
    states = {}
    for name, plugin in plugins.items():
        with blamed(name, "state_dict()"):
            state = plugin.state_dict()
        if not isinstance(state, dict):
            raise UserError(f"plugin {name!r}: state_dict() returns a dict, got {type(state).__name__}")
        states[name] = packed(state, f"plugin {name!r}: state_dict()")
    return states


def _read(folder: Path) -> dict[str, Any]:
    """trainer.pt with its values; tensors stay on the disk until they are used."""
    try:
        return unpacked(torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True, mmap=True))
    except (RuntimeError, UnpicklingError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder / 'trainer.pt'} does not read back: {str(error).splitlines()[0][:200]}\n"
            "a checkpoint holds what torch.load(weights_only=True) reads; is everything of one version of torch and numpy?"
        ) from None


def restore(run, folder: Path) -> None:
    """The inverse of `save`. Another data set or other trained parameters are UserErrors."""
    state = _read(folder)
    before, now = state["fingerprint"], run.task.fingerprint()
    if before != now:
        raise UserError(
            f"the run was started on other data (fingerprint {before}, now {now})\nrestore the data, or start a new run"
        )
    _check_origin(run, folder, state.get("origin"))
    _restore_policy(run, folder, state)
    run.optimizer.load_state_dict(state["optimizer"])
    run.data.load_state_dict(state["data"])
    for name, plugin in run.plugins.items():
        try:
            plugin.load_state_dict(state["plugins"].get(name, {}))
        except UserError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"plugin {name!r}: load_state_dict() raised {error!r} on the state in {folder}\n"
                f"at {where.filename}:{where.lineno}; was it saved by another version of the plugin?"
            ) from None
    run.step, run.updates = state["step"], state["updates"]
    run.cycle = unpack_cycle(state["cycle"])
    run.tracker.truncate(state["tracker"])


def origin(run) -> dict[str, str | None]:
    """What a checkpoint does not hold of the model that a run starts from, as hashes: a path may lead elsewhere later."""
    tokenizer = run.policy.tokenizer
    words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, sorted(run.policy.stop_ids)])
    return {
        "tokenizer": hashlib.sha256(words.encode()).hexdigest(),
        "reference": None if run.reference is None else digest(parts(run)[0]),
    }


def _check_origin(run, folder: Path, before: dict[str, str | None] | None) -> None:
    if before is None:  # of the former format: only the path says which model it was
        now, then = run.config.model.path, OmegaConf.load(folder / "config.yaml").model.path
        changed = [] if now == then else ["model"]
    else:
        changed = [name for name, value in run.origin.items() if before.get(name, value) != value]
    if changed and not run.config.resume_changed:
        raise UserError(
            f"the {' and the '.join(changed)} of model={run.config.model.path or run.config.model.kind} are not those that "
            f"the run of {folder} started from\nrestore the model; to go on with it as it is now: resume_changed=true"
        )


def _restore_policy(run, folder: Path, state: dict[str, Any]) -> None:
    trained, frozen = parts(run)
    whole = "frozen" not in state  # written when every checkpoint held the whole model, and shapes without names
    if state["trained"] != ([tuple(parameter.shape) for parameter in run.trained] if whole else _selection(trained)):
        raise UserError(
            f"{folder} was trained with another selection of parameters: resume with the same params= and model="
        )
    if not whole and state["frozen"] != run.frozen:
        raise UserError(
            f"{folder} holds the trained parameters only, and the frozen ones are not those that the run started from\n"
            "restore the model of model.path, or start a new run"
        )
    if frozen and not whole:
        saved = load_file(folder / "trained.safetensors")
        with torch.no_grad():
            for name, value in trained.items():
                value.copy_(saved[name])
    else:
        models.restore(run.policy.model, folder / "model")


def parts(run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The policy's parameters by name: those that train, and the others."""
    chosen = {id(parameter) for parameter in run.trained}
    found: tuple[dict, dict] = {}, {}
    for name, value in run.policy.model.named_parameters():
        found[id(value) not in chosen][name] = value
    return found


def _selection(trained: dict[str, torch.Tensor]) -> list[str]:
    """Names and shapes, as a checkpoint holds them."""
    return [f"{name} {list(value.shape)}" for name, value in trained.items()]


def digest(frozen: dict[str, torch.Tensor]) -> str | None:
    """SHA-256 of parameters that do not change; None if there are none."""
    if not frozen:
        return None
    digest = hashlib.sha256()
    for name, value in frozen.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack_cycle(cycle: Cycle | None) -> dict | None:
    """A cycle as plain dictionaries, lists and tensors."""
    if cycle is None:
        return None
    rollouts, rewards = (_pack_fields(part) for part in (cycle.rollouts, cycle.rewards))
    return {
        "rollouts": rollouts,
        "rewards": rewards,
        "advantages": cycle.advantages,
        "minibatches": cycle.minibatches,
        "done": cycle.done,
        "metrics": packed(cycle.metrics, "the step's metrics"),
    }


def _pack_fields(part: Rollouts | Rewards) -> dict[str, Any]:
    values = _contents(part)
    prompts = values.pop("prompts", None)
    plain = {name: packed(value, f"{type(part).__name__}.{name}") for name, value in values.items()}
    if prompts is not None:
        plain["prompts"] = [packed(_contents(prompt), "a prompt", _loosely) for prompt in prompts]
    return plain


def _contents(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are; `asdict` would go on into what they hold, and cannot copy all of it."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _loosely(value: Any) -> Any:
    """What stands for a value of a prompt's extra whose class a checkpoint cannot hold: what it is made of, or its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return _contents(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unpack_cycle(state: dict | None) -> Cycle | None:
    """The inverse of `pack_cycle`."""
    if state is None:
        return None
    prompts = tuple(Prompt(**prompt) for prompt in state["rollouts"].pop("prompts"))
    return Cycle(
        Rollouts(prompts=prompts, **state["rollouts"]),
        Rewards(**state["rewards"]),
        state["advantages"],
        state["minibatches"],
        done=state["done"],
        metrics=state["metrics"],
    )
