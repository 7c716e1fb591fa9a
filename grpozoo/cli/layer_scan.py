"""`grpozoo layer-scan`: what each decoder layer contributes when it trains alone.

    C(k) = (S_k - S_base) / (S_full - S_base)        scores S of held-out evaluation, means over the seeds

Full training and each layer alone have the same options, learning rate, steps and seeds; S_base is the evaluation
before the first step. C is undefined (NaN) where full training does not gain more than the noise of its own seeds.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

from omegaconf import OmegaConf

from grpozoo.compose.command import compose
from grpozoo.compose.settings import fingerprint, read
from grpozoo.errors import UserError

OWN = ("params", "seed", "run_dir", "resume", "plugins.layers")  # what the scan sets itself
OPTIONS = {  # flag -> (default, meaning)
    "--layers": ("all", "layers, e.g. 0,2,5; negative ones count from the end"),
    "--seeds": ("0", "seeds, e.g. 0,1,2"),
    "--metric": ("heldout/accuracy", "held-out metric that is the score, e.g. heldout/avg@8"),
    "--folder": ("runs/layer-scan", "where runs and results go; runs that are finished there are not repeated"),
}


def run(arguments: list[str]) -> int:
    """Train, compute, write profile.json, profile.md and profile.png; returns the exit status."""
    options, overrides = parse(arguments)
    folder = Path(options["--folder"]).resolve()
    seeds = numbers("--seeds", options["--seeds"])
    for seed in seeds:  # a mistake is found before anything trains
        read(compose(command(overrides, None, seed, folder)))
    full = [train(folder, overrides, None, seed) for seed in seeds]
    shape = json.loads((full[0] / "model" / "config.json").read_text())
    count = shape.get("text_config", shape)["num_hidden_layers"]
    wanted = range(count) if options["--layers"] == "all" else numbers("--layers", options["--layers"])
    outside = [layer for layer in wanted if not -count <= layer < count]
    if outside:
        raise UserError(f"--layers: there is no layer {outside[0]}; the model has 0 to {count - 1}")
    layers = sorted({layer % count for layer in wanted})
    alone = {}
    for layer in layers:
        alone[layer] = [train(folder, overrides, layer, seed) for seed in seeds]
        print(f"layer {layer}: {fmean(score(place, options['--metric'])[1] for place in alone[layer]):.4f}", flush=True)
    result = profile(options["--metric"], seeds, count, full, alone) | {"options": overrides}
    (folder / "profile.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "profile.md").write_text(text := table(result))
    print(text)
    plot(result, folder / "profile.png")
    print(folder / "profile.json")
    return 0


def parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Flags with their values, and the KEY=VALUE arguments of every run."""
    options, overrides, rest = {flag: default for flag, (default, _) in OPTIONS.items()}, [], list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in options:
            if not equals and not rest:
                raise UserError(f"{flag} needs a value: {OPTIONS[flag][1]}")
            options[flag] = value if equals else rest.pop(0)
        elif word.startswith("-"):
            raise UserError(
                f"layer-scan has no option {flag}\noptions: {', '.join(OPTIONS)}, and KEY=VALUE for the runs"
            )
        else:
            key = flag.lstrip("+~")
            if any(key == own or key.startswith(f"{own}.") for own in OWN):
                raise UserError(f"layer-scan sets {key} itself: use --layers, --seeds and --folder")
            overrides.append(word)
    return options, overrides


def numbers(flag: str, text: str) -> list[int]:
    """Whole numbers from a list with commas."""
    try:
        return [int(word) for word in text.strip("[]").split(",")]
    except ValueError:
        raise UserError(f"{flag}={text}: {OPTIONS[flag][1]}") from None


def command(overrides: list[str], layer: int | None, seed: int, place: Path) -> list[str]:
    """The arguments of one run. layer: null = full training."""
    what = ["params=full"] if layer is None else ["params=layers", f"plugins.layers.layer={layer}"]
    return [*overrides, *what, f"seed={seed}", f"run_dir='{place}'"]


def train(folder: Path, overrides: list[str], layer: int | None, seed: int) -> Path:
    """One run as a process of its own, unless it is finished already; its folder."""
    name = "full" if layer is None else f"layer-{layer}"
    place = folder / f"{name}-seed-{seed}"
    arguments = command(overrides, layer, seed, place)
    manifest = json.loads(text) if (text := _read(place / "manifest.json")) else {}
    if manifest:
        wanted, saved = compose(arguments), OmegaConf.load(place / "config.yaml")
        if fingerprint(saved) != fingerprint(wanted) or saved.steps != wanted.steps:
            raise UserError(f"{place} holds a run with other options\nchoose another --folder, or remove it")
    if not (manifest.get("finished") and (place / "summary.json").exists()):
        print(f"training {name}, seed {seed} ...", flush=True)
        resume = ["resume=auto"] if list(place.glob("checkpoints/step-*")) else []
        if manifest and not resume:  # killed before its first checkpoint
            (place / "manifest.json").unlink()
        answer = subprocess.run([sys.executable, "-m", "grpozoo", *arguments, *resume])
        if answer.returncode:
            raise UserError(f"the run {place} ended with status {answer.returncode}: start the scan again to go on")
    return place


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def score(place: Path, metric: str) -> tuple[float, float]:
    """The metric before the first step and at the end of a run."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    found = [line[metric] for line in lines if metric in line]
    if len(found) < 2:
        names = sorted({name for line in lines for name in line if name.startswith("heldout/")})
        raise UserError(f"--metric: the runs have no {metric!r}\navailable: {', '.join(names)}")
    return found[0], found[-1]


def contribution(alone: float, base: float, full: float, noise: float = 0.0) -> float:
    """C of one layer; NaN unless full training gained more than `noise`."""
    return (alone - base) / (full - base) if full - base > noise else math.nan


def spread(values: list[float]) -> float:
    """Standard error of the mean; 0 with one value, where it is unknown."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def profile(metric: str, seeds: list[int], count: int, full: list[Path], alone: dict[int, list[Path]]) -> dict:
    """Scores and contributions. The noise is twice the standard error of full training's gain over the seeds."""
    before, after = zip(*(score(place, metric) for place in full), strict=True)
    base, best = fmean(before), fmean(after)
    noise = 2 * spread([b - a for a, b in zip(before, after, strict=True)])
    scores = {layer: [score(place, metric)[1] for place in places] for layer, places in alone.items()}
    C = {layer: contribution(fmean(values), base, best, noise) for layer, values in scores.items()}
    error = {layer: spread(values) / (best - base) if best > base else math.nan for layer, values in scores.items()}
    return {
        "metric": metric,
        "seeds": seeds,
        "layers": count,
        "base": base,
        "full": best,
        "noise": noise,
        "scores": {str(layer): values for layer, values in scores.items()},
        "C": {str(layer): _plain(value) for layer, value in C.items()},
        "C_error": {str(layer): _plain(value) for layer, value in error.items()},
        "spearman_depth": rank_correlation(list(C), list(C.values())),
        "spearman_middle": rank_correlation([-abs(layer - (count - 1) / 2) for layer in C], list(C.values())),
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rank_correlation(one: list[float], two: list[float]) -> float | None:
    """Spearman's, equal values at their mean rank; None where it is undefined."""
    from scipy.stats import rankdata

    if len(one) < 3 or any(map(math.isnan, two)) or len(set(one)) == 1 or len(set(two)) == 1:
        return None
    a, b = (rankdata(values) for values in (one, two))
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / ((a * a).sum() * (b * b).sum()) ** 0.5)


def table(result: dict) -> str:
    """Score and C of each layer, as Markdown."""
    seeds = len(result["seeds"])
    lines = [
        f"score: {result['metric']}, mean of {seeds} seed{'s' * (seeds > 1)}; C = (S - base) / (full - base), ± standard error",
        "",
        "| trains | score | C |",
        "| --- | --- | --- |",
        f"| nothing | {result['base']:.4f} | 0 |",
    ]
    for layer, values in result["scores"].items():
        C, error = result["C"][layer], result["C_error"][layer]
        text = "NaN" if C is None else f"{C:.2f}" + (f" ± {error:.2f}" if seeds > 1 else "")
        lines.append(f"| layer {layer} | {fmean(values):.4f} | {text} |")
    lines.append(f"| everything | {result['full']:.4f} | 1 |")
    if None in result["C"].values():
        lines += [
            "",
            "NaN: full training did not gain more than its noise, so C is undefined. Train longer, or more seeds.",
        ]
    for name, what in (("spearman_depth", "depth"), ("spearman_middle", "closeness to the middle")):
        if result[name] is not None:
            lines += ["", f"Spearman correlation of C with {what}: {result[name]:.2f}"]
    return "\n".join(lines) + "\n"


def plot(result: dict, file: Path) -> None:
    """C over the layers, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [(int(layer), value, result["C_error"][layer]) for layer, value in result["C"].items() if value is not None]
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    if known:
        axis.errorbar(*map(list, list(zip(*known, strict=True))[:2]), yerr=[error for _, _, error in known], marker="o")
    for height, name in ((0, "nothing"), (1, "everything")):
        axis.axhline(height, color="grey", linewidth=0.8)
        axis.annotate(name, (0, height), fontsize=8, xytext=(2, 3), textcoords="offset points")
    axis.set_xticks([int(layer) for layer in result["C"]])
    axis.set_xlabel("layer that trains alone")
    axis.set_ylabel(f"C of {result['metric']}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
