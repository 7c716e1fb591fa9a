"""`grpozoo explain metrics | RUN | KEY=VALUE ...`: what the numbers mean, and who does what in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpozoo.errors import UserError, nearest
from grpozoo.hooks import KINDS
from grpozoo.metrics import METRICS, describe
from grpozoo.run.tracking import read_lines

ORDER = {
    "chain": "each changes the result of the one before it",
    "one": "the first that answers wins, wrappers follow",
    "multiply": "factors, any order",
    "sum": "terms, any order",
    "collect": "merged, any order",
    "all": "all are called",
}


def metrics(plugins: Mapping[str, Any]) -> str:
    """A table of all metrics, those of the given plugins (name -> class) included: name, unit, meaning."""
    texts = dict(METRICS)
    for name, plugin in plugins.items():
        texts |= {f"{name}/{key}": text for key, text in plugin.metrics.items()}
    rows = []
    for name, text in texts.items():
        unit, _, meaning = text.partition(": ")
        rows.append((name, unit, meaning) if meaning else (name, "", unit))
    return _table([("metric", "unit", "meaning (expected)"), *rows])


def run(folder: Path | str, plugins: Mapping[str, Any] | None = None) -> str:
    """What a run folder says about itself: plugins, hooks, versions, seeds, the last metrics with their meaning."""
    folder = Path(folder)
    manifest = _manifest(folder)
    parts = [f"run {folder}", _facts(manifest)]
    if "plugins" in manifest:
        parts.append("plugins, in the order of application\n" + _plugins(manifest["plugins"]))
    if manifest.get("hooks"):
        parts.append("who answered which hook\n" + _hooks(manifest["hooks"]))
    lines = read_lines(folder / "metrics.jsonl")
    if lines:
        parts.append("last metrics\n" + _last(lines, plugins))
    if (folder / "config.yaml").is_file():
        parts.append(f"the whole configuration is in {folder / 'config.yaml'}")
    return "\n\n".join(part for part in parts if part)


def command(overrides: list[str]) -> str:
    """What a command line would run, without loading a model: plugins, hooks, notices."""
    from grpozoo.compose.command import compose
    from grpozoo.compose.settings import read

    settings = read(compose(overrides))
    manifest = settings.active.manifest()
    parts = [
        "plugins, in the order of application\n" + _plugins(manifest["plugins"]),
        "who answers which hook\n" + _hooks(manifest["hooks"]),
        *settings.notices,
    ]
    return "\n\n".join(parts)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        names = [entry.name for entry in folder.absolute().parent.glob("*") if entry.is_dir()]
        hint = "" if folder.is_dir() else nearest(folder.name, names)
        where = f"{folder} is not a run folder: it has no manifest.json{hint}"
        raise UserError(f"{where}\ngrpozoo explain metrics | RUN_FOLDER")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} does not read: {error}") from None


def _facts(manifest: Mapping[str, Any]) -> str:
    """Every entry of the manifest but those that have a table."""
    rows = []
    for key, value in manifest.items():
        if key in ("plugins", "hooks"):
            continue
        items = value.items() if isinstance(value, Mapping) else ()
        rows.append((key, ", ".join(f"{name} {_text(item)}" for name, item in items) or _text(value)))
    return _table(rows)


def _hooks(hooks: Mapping[str, list[str]]) -> str:
    rows = [("hook", "kind", "plugins in order", "how they combine")]
    for hook, names in hooks.items():
        kind = KINDS.get(hook, "?")
        rows.append((hook, kind, ", ".join(names), ORDER.get(kind, "")))
    return _table(rows)


def _last(lines: list[dict[str, Any]], plugins: Mapping[str, Any] | None) -> str:
    last = {name: (line["step"], value) for line in lines for name, value in line.items() if name != "step"}
    rows = [(name, _text(value), str(step), describe(name, plugins) or "") for name, (step, value) in last.items()]
    return _table([("metric", "value", "step", "meaning (expected)"), *rows])


def _plugins(plugins: Any) -> str:
    """A list of names or entries, or name -> entry; an entry is a mapping or a version."""
    named = plugins.items() if isinstance(plugins, Mapping) else ((_name(entry), entry) for entry in plugins)
    rows = []
    for number, (name, entry) in enumerate(named, 1):
        facts = entry if isinstance(entry, Mapping) else {} if entry == name else {"version": entry}
        text = ", ".join(f"{key} {_text(value)}" for key, value in facts.items() if key != "name")
        rows.append((str(number), name, text))
    return _table(rows)


def _name(entry: Any) -> str:
    return str(entry.get("name", "?")) if isinstance(entry, Mapping) else str(entry)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _table(rows: list[tuple[str, ...]]) -> str:
    """Columns aligned by spaces."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ([f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)
