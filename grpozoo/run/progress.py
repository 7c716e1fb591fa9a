"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

LINES = 20  # plain lines of a whole run where there is no terminal


class Progress:
    """Step, reward, held-out accuracy, entropy, length, tokens/s and time left."""

    def __init__(self, total: int, enabled: bool = True, stream: TextIO | None = None):
        self.total = total
        self.enabled = enabled
        self.stream = stream or sys.stderr
        self.seen: dict[str, Any] = {}  # the last value of each metric: held-out ones come every few steps
        self.bar: Any = None
        self.first: tuple[int, float] | None = None  # step and time of the first line, for the time left

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` is done."""
        self.seen.update({name: value for name, value in metrics.items() if value is not None})
        self.first = self.first or (step, time.monotonic())
        if not self.enabled:
            return
        if self.stream.isatty():
            self._bar(step)
        elif step % max(1, self.total // LINES) == 0 or step == self.total or "heldout/accuracy" in metrics:
            self.print(f"step {step}/{self.total}  {self.text()}  left {self._left(step)}")

    def text(self) -> str:
        """The figures of the line; a dash for one that is not known yet."""
        shown = [
            ("reward", "reward/total_mean", "{:.3f}"),
            ("held-out", "heldout/accuracy", "{:.1%}"),
            ("entropy", "rollout/entropy", "{:.3f}"),
            ("length", "rollout/length_mean", "{:.1f}"),
            ("tokens/s", "rollout/tokens_per_second", "{:.0f}"),
        ]
        figures = {name: form.format(self.seen[name]) for _, name, form in shown if name in self.seen}
        return "  ".join(f"{label} {figures.get(name, '-')}" for label, name, _ in shown)

    def print(self, line: str) -> None:
        """A line of text that does not tear the live line."""
        if self.bar is not None:
            self.bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        """Leave the live line as it is."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _bar(self, step: int) -> None:
        if self.bar is None:
            from tqdm import tqdm  # not needed by runs without a terminal

            form = "step {n_fmt}/{total_fmt} {bar:12}{postfix}  left {remaining}"
            self.bar = tqdm(total=self.total, initial=step, file=self.stream, bar_format=form, dynamic_ncols=True)
        self.bar.set_postfix_str(self.text(), refresh=False)
        self.bar.update(step - self.bar.n)
        self.bar.refresh()

    def _left(self, step: int) -> str:
        start, began = self.first or (step, 0.0)
        if step <= start:
            return "-"
        seconds = round((time.monotonic() - began) / (step - start) * (self.total - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def final_table(summary: Mapping[str, Any], run_dir: Path | str, model_dir: Path | str | None = None) -> str:
    """The result of a run as aligned plain text; `summary` as grpozoo.run.tracking.summarize makes it."""
    heldout = summary.get("heldout", {})
    rows = [("held-out accuracy", _change(summary.get("heldout_accuracy", {}), "{:.1%}"))]
    shares = [name for name in heldout if name.startswith(("avg@", "pass@", "maj@"))]
    rows += [(name, _change(heldout[name], "{:.1%}")) for name in shares]
    rows += [
        ("reward", _change(summary.get("reward", {}), "{:.3f}")),
        ("completion length", _change(summary.get("length_tokens", {}), "{:.1f}", " tokens")),
        ("generation", _figure(summary.get("tokens_per_second"), "{:.0f} tokens/s")),
        ("time", _figure(summary.get("seconds"), "{:.1f} s") + _figure(summary.get("steps"), " for {:.0f} steps")),
        ("peak memory", _figure(summary.get("peak_memory_mb"), "{:.0f} MB")),
        ("run folder", str(run_dir)),
    ]
    if model_dir is not None:
        rows.append(("load the model", f'AutoModelForCausalLM.from_pretrained("{model_dir}")'))
    rows = [(label, text) for label, text in rows if text]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _change(span: Mapping[str, float | None], form: str, unit: str = "") -> str:
    start, end = span.get("start"), span.get("end")
    if end is None:
        return ""
    text = f"{form.format(end)}{unit}" if start is None else f"{form.format(start)} -> {form.format(end)}{unit}"
    if start is not None and "%" in form:
        text += f"  ({100 * (end - start):+.1f} points)"
    return text
