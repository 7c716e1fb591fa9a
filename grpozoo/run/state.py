"""What a run keeps on disk: the manifest, and checkpoints from which it goes on bit for bit.

A checkpoint holds the model in Hugging Face format (`model/`), and in `trainer.pt` plain tensors, numbers and lists:
optimizer, counters, data position, plugin state, the unfinished cycle of rollouts, positions of the metric files.
Where only some parameters train, `trained.safetensors` takes the place of `model/`: those parameters alone. The others
are those that the run started from; a hash of them makes sure that a resumed run finds the same.
Random streams need no saving: they are named by what they are for (grpozoo.rng).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from grpozoo.cycle import Cycle
from grpozoo.errors import UserError
from grpozoo.models import files as models
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
    if run.accelerator.is_main_process:
        run.store.save(run.step, lambda folder: _write(run, folder))
    run.accelerator.wait_for_everyone()


def _write(run, folder: Path) -> None:
    trained, frozen = parts(run)
    if frozen:
        save_file(
            {name: value.detach().contiguous() for name, value in trained.items()}, folder / "trained.safetensors"
        )
    else:
        models.save(run.policy.model, run.policy.tokenizer, folder / "model")
    write_text(folder / "config.yaml", run.settings.yaml())
    state = {
        "fingerprint": run.task.fingerprint(),
        "step": run.step,
        "updates": run.updates,
        "optimizer": run.optimizer.state_dict(),
        "trained": _selection(trained),
        "frozen": run.frozen,
        "data": run.data.state_dict(),
        "plugins": {name: plugin.state_dict() for name, plugin in run.plugins.items()},
        "cycle": pack_cycle(run.cycle),
        "tracker": run.tracker.position(),
    }
    torch.save(state, folder / "trainer.pt")


def restore(run, folder: Path) -> None:
    """The inverse of `save`. Another data set or other trained parameters are UserErrors."""
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    before, now = state["fingerprint"], run.task.fingerprint()
    if before != now:
        raise UserError(
            f"the run was started on other data (fingerprint {before}, now {now})\nrestore the data, or start a new run"
        )
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
    run.optimizer.load_state_dict(state["optimizer"])
    run.data.load_state_dict(state["data"])
    for name, plugin in run.plugins.items():
        plugin.load_state_dict(state["plugins"].get(name, {}))
    run.step, run.updates = state["step"], state["updates"]
    run.cycle = unpack_cycle(state["cycle"])
    run.tracker.truncate(state["tracker"])


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
    rollouts = {f.name: getattr(cycle.rollouts, f.name) for f in fields(Rollouts)}
    rollouts["prompts"] = [plain(asdict(prompt)) for prompt in cycle.rollouts.prompts]
    rewards = {f.name: getattr(cycle.rewards, f.name) for f in fields(Rewards)}
    return {
        "rollouts": rollouts,
        "rewards": rewards,
        "advantages": cycle.advantages,
        "minibatches": cycle.minibatches,
        "done": cycle.done,
        "metrics": cycle.metrics,
    }


def plain(value):
    """What a checkpoint can hold without running code when it is read; anything else in a prompt's extra becomes text."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if type(value) is tuple else list)(map(plain, value))
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy's numbers and arrays; dates


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
