"""The record of a run: files first, then trackers, then what a person sees.

    metrics.jsonl      a line per step: {"step", "seconds", NAME: number}; null stands for NaN and infinity
    completions.jsonl  a line per completion shown: prompt, text, rewards, advantage, ids
    summary.json       the result, written at the end from metrics.jsonl

A checkpoint remembers `position()`; `truncate(position)` takes both files back to it, so that a run that was killed
and resumed leaves the lines of an uninterrupted one, apart from times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from grpozoo.errors import UserError, unknown
from grpozoo.metrics import WINDOW, diagnose
from grpozoo.run.progress import Progress, final_table
from grpozoo.storage import write_json

if TYPE_CHECKING:
    from torch import Tensor

    from grpozoo.types import Prompt, Rewards, Rollouts

FILES = ("metrics.jsonl", "completions.jsonl")
TRACKERS = {  # accelerate's name -> packages, any of which will do
    "aim": ("aim",),
    "clearml": ("clearml",),
    "comet_ml": ("comet_ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker that accelerate does not know or whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker in logger.trackers", name, TRACKERS)
        if not any(find_spec(package) for package in TRACKERS[name]):
            raise UserError(
                f"logger.trackers: {name} needs the package {TRACKERS[name][0]}, which is not installed\n"
                f"pip install {TRACKERS[name][0]}, or logger=files for metrics.jsonl alone"
            )


class Tracker:
    """Writes and shows the metrics of a run; on every process but the main one it does nothing."""

    def __init__(
        self,
        run_dir: Path | str,
        config: Any,
        accelerator: Any = None,
        is_main: bool = True,
        stream: TextIO | None = None,
        record: Mapping[str, Any] | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.config = config
        self.accelerator = accelerator  # created with log_with=config.logger.trackers; None: no trackers
        self.record = record  # the configuration without secrets, as trackers are told it; None: config
        self.is_main = is_main
        self.stream = stream or sys.stderr
        self.progress = Progress(config.steps, config.logger.progress and is_main, self.stream)
        self.began = time.monotonic()
        self.started = False  # the trackers
        self.warned: set[str] = set()
        self.history: deque[dict[str, Any]] = deque(maxlen=2 * WINDOW)  # evaluations have lines of their own
        if is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Since the start of the run, interruptions left out."""
        return time.monotonic() - self.began

    def position(self) -> dict[str, float]:
        """Bytes on the disk of each file, and seconds so far: what a checkpoint keeps."""
        return {**{name: _synced_size(self.run_dir / name) for name in FILES}, "seconds": self.seconds}

    def truncate(self, position: Mapping[str, float]) -> None:
        """Cut the files back to a `position()`; {} empties them. Before the first `log` of a run."""
        self.began = time.monotonic() - position.get("seconds", 0.0)
        for name in FILES:
            path = self.run_dir / name
            size, wanted = path.stat().st_size if path.exists() else 0, int(position.get(name, 0))
            if self.is_main and size > wanted:
                os.truncate(path, wanted)
            elif self.is_main and size < wanted:  # cut by a full disk or by hand, or another folder's checkpoint
                _drop_half_line(path)
                self.progress.print(
                    f"{path} has {size} of the {wanted} bytes that the checkpoint remembers: lines of earlier steps are "
                    "missing, and summary.json will be made of those that are left"
                )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, to metrics.jsonl, the trackers and the progress line; warns of trouble, once each."""
        if not self.is_main:
            return
        line = {"step": step, "seconds": round(self.seconds, 3)}
        line |= {name: _number(value) for name, value in metrics.items()}
        _append(self.run_dir / FILES[0], [line])
        self._send(step, {name: value for name, value in line.items() if name != "step" and value is not None})
        self.progress.update(step, line)
        self.history.append(line)
        for kind, message in diagnose(self.history).items():
            if kind not in self.warned:
                self.warned.add(kind)
                self.progress.print(f"warning at step {step}: {message}")

    def value(self, name: str, step: int) -> float | None:
        """What was logged under a name in a recent step; None if nothing was."""
        return next((line[name] for line in self.history if line["step"] == step and name in line), None)

    def completions(self, step: int, rollouts: Rollouts, rewards: Rewards, advantages: Tensor) -> None:
        """The first logger.completions rows of a step by (group_id, sample_id), so that siblings stand together.

        advantages: [R] or [R, T], written as the mean over the completion's tokens.
        """
        limit = self.config.logger.completions
        if not self.is_main or limit == 0:
            return
        groups, samples = rollouts.group_id.tolist(), rollouts.sample_id.tolist()
        order = sorted(range(len(rollouts)), key=lambda row: (groups[row], samples[row]))
        rows = order if limit < 0 else order[:limit]
        _append(self.run_dir / FILES[1], [_completion(step, row, rollouts, rewards, advantages) for row in rows])

    def finish(self, model_dir: Path | str | None = None, **extra: Any) -> dict[str, Any]:
        """Write summary.json (with `extra` keys), close the trackers, print the final table; returns the summary."""
        if not self.is_main:
            return {}
        summary = {**summarize(read_lines(self.run_dir / FILES[0])), **extra}
        if model_dir is not None:
            summary["model"] = str(model_dir)
        write_json(self.run_dir / "summary.json", summary)
        self.close()
        if self.config.logger.progress:
            print(final_table(summary, self.run_dir, model_dir), flush=True)
        return summary

    def close(self) -> None:
        """End the live line and the trackers; also for a run that is interrupted."""
        self.progress.close()
        if self.started and self.accelerator is not None:
            self._end_trackers()
        self.started = False

    def _end_trackers(self) -> None:
        """One by one: accelerate's `end_training` ends the process group too, which the other processes still wait in."""
        for tracker in self.accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:  # as in `_send`: the run is trained and saved
                self.progress.print(f"warning: tracker {tracker.name} did not finish: {error!r}")

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        """To accelerate's trackers. One that fails is given up: the files hold everything."""
        if self.accelerator is None or not self.config.logger.trackers:
            return
        try:
            if not self.started:
                self.started = True
                purge = {"tensorboard": {"purge_step": step}}  # hides what a killed run wrote beyond its checkpoint
                options = purge if "tensorboard" in self.config.logger.trackers else {}
                project = self.config.logger.project
                self.accelerator.init_trackers(
                    project, config=settings(self.record or self.config), init_kwargs=options
                )
            self.accelerator.log(values, step=step)
        except Exception as error:  # a tracker's network or disk; training does not depend on it
            self.accelerator = None
            self.progress.print(f"warning at step {step}: trackers are off, metrics.jsonl goes on: {error!r}")


def settings(config: Any) -> dict[str, bool | int | float | str]:
    """The configuration as flat `section.key: value`, as trackers want it."""
    if is_dataclass(config) and not isinstance(config, type):
        config = asdict(config)
    elif not isinstance(config, Mapping):
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True)
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in settings(value).items()}
        else:
            flat[str(key)] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """The objects of a JSONL file, a line each; [] if there is none. What a crash or a hand left of a line is left out."""
    if not Path(path).is_file():
        return []
    return [line for text in Path(path).read_bytes().split(b"\n") if isinstance(line := _parsed(text), dict)]


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def summarize(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """metrics.jsonl -> the result. reward and length: means over the first and the last five steps; None: not known."""
    heldout = {
        name.removeprefix("heldout/"): _span([line[name] for line in lines if line.get(name) is not None], 1)
        for name in dict.fromkeys(name for line in lines for name in line if name.startswith("heldout/"))
    }
    timed = [line for line in lines if line.get("time/generate_s")]  # a cycle out of a checkpoint took no time
    tokens, generating = sum(_values(timed, "rollout/tokens")), sum(_values(timed, "time/generate_s"))
    steps = len({line.get("step") for line in lines if "reward/total_mean" in line})
    step_seconds = _values(lines, "time/step_s")
    return {
        "heldout_accuracy": heldout.get("accuracy", {"start": None, "end": None}),  # share, greedy
        "heldout": heldout,
        "reward": _span(_values(lines, "reward/total_mean"), 5),
        "length_tokens": _span(_values(lines, "rollout/length_mean"), 5),
        "steps": steps,
        "seconds": max(_values(lines, "seconds"), default=0.0),
        "seconds_per_step": sum(step_seconds) / len(step_seconds) if step_seconds else None,
        "generated_tokens": int(sum(_values(lines, "rollout/tokens"))),
        "tokens_per_second": tokens / generating if generating else None,  # while generating
        "peak_memory_mb": max(_values(lines, "memory/peak_mb"), default=None),  # 1e6 bytes
    }


def peak_memory_mb() -> float | None:
    """Peak of this process in MB of 1e6 bytes, or of its accelerator if it uses one; None where nobody counts."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e6
    try:  # Linux; getrusage would count what the parent process held before it started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _completion(step: int, row: int, rollouts: Rollouts, rewards: Rewards, advantages: Tensor) -> dict[str, Any]:
    mask = rollouts.completion_mask[row]
    advantage = advantages[row] if advantages.dim() == 1 else advantages[row][mask].mean()
    return {
        "step": step,
        "group_id": int(rollouts.group_id[row]),
        "sample_id": int(rollouts.sample_id[row]),
        "prompt_id": rollouts.prompts[row].id,
        "prompt": _prompt_text(rollouts.prompts[row]),
        "completion": rollouts.text[row],
        "answer": rollouts.prompts[row].answer,
        "rewards": {name: _number(values[row]) for name, values in rewards.components.items()},
        "total": None if rewards.total is None else _number(rewards.total[row]),
        "advantage": _number(advantage),
        "length": int(mask.sum()),
        "finish_reason": rollouts.finish_reason[row],
        "tag": rollouts.tag[row],
        "policy": rollouts.policy[row],
        **({"design": {n: int(v[row]) for n, v in rollouts.design.items()}} if rollouts.design else {}),
    }


def _prompt_text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def _append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """In one write, so that a kill leaves whole lines."""
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    content = text.encode("utf-8", "backslashreplace")
    with open(path, "ab", buffering=len(content) + 2) as stream:
        stream.write(content)


def _drop_half_line(path: Path) -> None:
    """The next line must not be joined to what a cut left of the last one."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _synced_size(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "ab") as stream:
        os.fsync(stream.fileno())
    return path.stat().st_size


def _number(value: Any) -> float | int | None:
    value = value.item() if hasattr(value, "item") else value
    return value if value is not None and isfinite(value) else None


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _span(values: Sequence[float], window: int) -> dict[str, float | None]:
    first, last = values[:window], values[-window:]
    return {"start": sum(first) / len(first) if first else None, "end": sum(last) / len(last) if last else None}
