"""SCOPE-RL at toy scale: chains of single digits, a policy that knows both prompt formats and pads its work.

    python replicate.py --jobs 2                      GRPO, ASR only, SCOPE-RL; five seeds
    python replicate.py --arms GRPO "mix"             some arms only; runs that exist in --folder are not repeated

Each seed has a warm start of its own. It is taught on plain prompts and on prompts with sub-questions, on chains of two to
four numbers, with 30 % of lines that lead nowhere; then, for a few steps, by somebody who slips at 60 % of the steps. The
policy knows the work and samples it badly: few answers are right. Accuracy, length and the share of useful steps are measured on
plain prompts only. Sampled tokens count the completions that were drawn again, too. Writes results.json (numbers of
every run), results.md (means with 95 % confidence intervals over the seeds, Student's t) and results.png. Each run is a
process with one thread; --jobs says how many at a time.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).resolve().parents[1]))
from intervals import shown  # noqa: E402

HERE = Path(__file__).resolve().parent
CHAINS = {"level": 3, "digits": 1, "min_terms": 4, "terms": 4}  # 7-2+9-4=, three steps, two sub-questions
COMMON = [
    *(f"task.{name}={value}" for name, value in CHAINS.items()), "max_completion_length=72", "lr=3e-4",
    "prompts_per_step=8", "eval.prompts=128", "eval.samples=4", "eval.ks=[1,4]", "eval.every=20", "logger.completions=-1",
    "logger.trackers=[]", "logger.progress=false", "checkpoint.every=0",
]  # fmt: skip
ARMS = {
    "GRPO": [],
    "ASR only": ["algo=scope_rl", "plugins.scope_rl.stage=asr"],
    "SCOPE-RL": ["algo=scope_rl"],
    "alpha 0": ["algo=scope_rl", "plugins.scope_rl.alpha=0"],
    "mix": ["algo=scope_rl", "plugins.scope_rl.stage=mix"],
}
SHORT = ["GRPO", "ASR only", "SCOPE-RL"]  # the arms that run unless others are asked for
COLUMNS = {  # heading -> (series, how its values over a run become a number, digits)
    "start": ("heldout/avg@4", "first", 3),
    "accuracy, equal steps": ("heldout/avg@4", "last", 3),
    "accuracy, equal tokens": ("heldout/avg@4", "tokens", 3),
    "greedy": ("heldout/accuracy", "last", 3),
    "eta, first quarter": ("eta", "quarter", 2),
    "eta, second half": ("eta", "half", 2),
    "routed, end": ("scope_rl/routed", "end", 2),
    "length, start": ("heldout/length_mean", "first", 1),
    "length, end": ("heldout/length_mean", "last", 1),
    "useful, start": ("useful", "head", 2),
    "useful, end": ("useful", "end", 2),
    "million tokens": ("tokens", "last", 2),
}
CURVES = (("heldout/avg@4", "step"), ("heldout/avg@4", "tokens"), ("eta", "step"), ("heldout/length_mean", "step"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=SHORT)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/scope_rl"))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--warm-start", type=int, metavar="SEED", help="make one warm start, in this process")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.warm_start is not None:
        return warm_start(folder / f"policy-{args.warm_start}", args.warm_start)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: ensure(folder, seed), args.seeds))
        jobs = [(name, seed) for seed in args.seeds for name in args.arms]
        places = list(pool.map(lambda job: run(folder, args.steps, *job), jobs))
    runs = [{"arm": name, "seed": seed, **read(place)} for (name, seed), place in zip(jobs, places, strict=True)]
    starts = [json.loads((folder / f"policy-{seed}" / "recipe.json").read_text())["result"] for seed in args.seeds]
    arms = {name: ARMS[name] for name in args.arms}
    record = {"common": [*COMMON, f"steps={args.steps}"], "arms": arms, "warm_starts": starts, "runs": runs}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(record) + "\n")
    (args.out / "results.md").write_text(text := table(record))
    print(text)
    plot(record, args.out / "results.png")


def warm_start(place: Path, seed: int) -> None:
    """A small policy that has seen worked solutions of both formats, and then bad ones."""
    from grpozoo.config import Model
    from grpozoo.models.warm_start import Recipe, train
    from grpozoo.tasks.arithmetic import Arithmetic

    shape, first = Model(layers=2, width=96, heads=4), place.with_name(f"{place.name}-first")
    taught = {**CHAINS, "padding": 0.3, "scaffold_share": 0.5}
    fixed = {"seed": seed, "careless": 0.0, "target": 1.0, "probe": 256}  # no target that ends it early
    for folder in (place, first):
        folder.mkdir(parents=True, exist_ok=True)
    good = Arithmetic(Arithmetic.Config(**taught | {"min_terms": 2}))
    train(shape, good, first, Recipe(**fixed, max_steps=700, cooldown=100, every=700))
    bad = Arithmetic(Arithmetic.Config(**taught, slips=0.6))
    train(shape, bad, place, Recipe(**fixed, lr=1e-3, max_steps=120, cooldown=60, every=120), first)


def ensure(folder: Path, seed: int) -> None:
    """The warm start of a seed, unless it is there."""
    if not (folder / f"policy-{seed}" / "recipe.json").exists():
        call([sys.executable, __file__, "--warm-start", str(seed), "--folder", str(folder)])
        print(f"warm start of seed {seed}: done", file=sys.stderr, flush=True)


def run(folder: Path, steps: int, name: str, seed: int) -> Path:
    """One run, unless it is there."""
    place = folder / f"{name.replace(' ', '_').replace(',', '')}-{steps}-{seed}"
    if not (place / "summary.json").exists():
        options = [f"model.path={folder / f'policy-{seed}'}", f"steps={steps}", f"seed={seed}", f"run_dir='{place}'"]
        call([sys.executable, "-m", "grpozoo", *COMMON, *ARMS[name], *options, "resume=null"])
        print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    return place


def call(command: list[str]) -> None:
    """In a process of one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    if answer.returncode:
        raise SystemExit(f"{' '.join(command)}\n{answer.stderr}")


def read(place: Path) -> dict:
    """Series of a run: name -> [[step, value], ...]. tokens: millions sampled so far; eta: groups that are trained on."""
    kept = {name for name, *_ in COLUMNS.values()} | {name for name, _ in CURVES}
    series: dict[str, list] = {}
    tokens = 0.0
    for line in map(json.loads, (place / "metrics.jsonl").read_text().splitlines()):
        step = line["step"]
        tokens += (line.get("rollout/tokens", 0) + line.get("scope_rl/replaced", 0)) / 1e6
        found = line | {"tokens": tokens} | ({"eta": 1 - line["groups/equal"]} if "groups/equal" in line else {})
        for name in kept & set(found):
            if isinstance(found[name], (int, float)):
                series.setdefault(name, []).append([step, round(found[name], 4)])
    series["useful"] = [[step, round(value, 4)] for step, value in useful(place / "completions.jsonl")]
    return {"series": series}


def useful(file: Path) -> list[tuple[int, float]]:
    """(step, share of useful steps) of the right completions of plain prompts, by the rules, whatever the method."""
    from grpozoo import Prompt
    from grpozoo.rewards.judge import RuleJudge

    judge, shares = RuleJudge(), {}
    for row in map(json.loads, file.read_text().splitlines()):
        if row["tag"] == "train" and row["rewards"]["answer"] == 1:
            extra = {"expression": row["prompt"].rstrip("="), "modulus": CHAINS.get("modulus", 0)}
            if labels := judge.label(Prompt(row["prompt_id"], text=row["prompt"], extra=extra), row["completion"]):
                shares.setdefault(row["step"], []).append(labels.count("useful") / len(labels))
    return [(step, fmean(values)) for step, values in sorted(shares.items())]


def number(series: dict, name: str, how: str, budget: float) -> float | None:
    """One number of a run. head, end: mean of the first or last tenth; quarter, half: of that part, the first or the
    second; tokens: linear between evaluations, where `budget` million tokens were sampled."""
    points = series.get(name, [])
    values = [value for _, value in points]
    if not values:
        return None
    if how == "tokens":
        spent = dict(map(tuple, series["tokens"]))
        xs = [spent[step] for step, _ in points]
        pairs = zip(zip(xs, values, strict=True), zip(xs[1:], values[1:], strict=True), strict=False)
        inside = (a + (b - a) * (budget - x) / (y - x) for (x, a), (y, b) in pairs if x <= budget <= y and y > x)
        return next(inside, values[-1])
    count = len(values)
    tenth = max(count // 10, 1)
    parts = {"first": values[:1], "last": values[-1:], "head": values[:tenth], "end": values[-tenth:],
             "quarter": values[: max(count // 4, 1)], "half": values[count // 2 :]}  # fmt: skip
    return fmean(parts[how])


def table(record: dict) -> str:
    """Mean +- 95 % interval over the seeds, one line for each arm."""
    runs = record["runs"]
    budget = min(one["series"]["tokens"][-1][1] for one in runs)
    seeds = sorted({one["seed"] for one in runs})
    reached = ", ".join(f"{start['sampled']:.1%}" for start in record["warm_starts"])
    lines = [
        "# SCOPE-RL on chains of single digits",
        "",
        f"`python replicate.py`: {len(seeds)} seeds, mean ± half the 95 % confidence interval over them (Student's t).",
        f"Warm starts: {reached} of the sampled answers right. Equal tokens: {budget:.2f} million, what the cheapest run sampled.",
        "All but `routed` and eta is measured on plain prompts; eta is the share of groups with unequal rewards in the batch.",
        "",
        "Common options: `" + " ".join(record["common"]) + "`.",
        "",
        "| arm | " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * (len(COLUMNS) + 1),
    ]
    for arm in record["arms"]:
        cells = []
        for name, how, digits in COLUMNS.values():
            found = [number(one["series"], name, how, budget) for one in runs if one["arm"] == arm]
            values = [value for value in found if value is not None]
            cells.append(shown(values, digits))
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", "| arm | options |", "| --- | --- |"]
    lines += [f"| {arm} | `{' '.join(options) or 'none'}` |" for arm, options in record["arms"].items()]
    return "\n".join(lines) + "\n"


def plot(record: dict, file: Path) -> None:
    """Mean curves with the range of the seeds, in a dozen or two of points."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(5.5 * len(CURVES), 4.3))
    for axis, (name, along) in zip(axes, CURVES, strict=True):
        for arm in record["arms"]:
            tables = [dict(map(tuple, one["series"].get(name, []))) for one in record["runs"] if one["arm"] == arm]
            spent = [dict(map(tuple, one["series"]["tokens"])) for one in record["runs"] if one["arm"] == arm]
            steps = sorted(set.intersection(*map(set, tables)))
            size = max(len(steps) // 25, 1)
            chunks = [steps[i : i + size] for i in range(0, len(steps), size)]
            rows = [[fmean(one[step] for step in chunk) for one in tables] for chunk in chunks]  # [points, seeds]
            x = [chunk[len(chunk) // 2] for chunk in chunks]
            if along == "tokens":
                x = [fmean(one[step] for one in spent) for step in x]
            line = axis.plot(x, [fmean(row) for row in rows], label=arm)[0]
            axis.fill_between(x, [min(row) for row in rows], [max(row) for row in rows], alpha=0.12, color=line.get_color())  # fmt: skip
        axis.set_xlabel("million sampled tokens" if along == "tokens" else along)
        axis.set_ylabel(name)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
