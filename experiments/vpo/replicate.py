"""VPO against its controls on digit_picks: the best of k answers, and how far the answers of a pool are apart.

    python replicate.py --jobs 2                   GRPO, Multi-RLVR and VPO, five seeds, components that conflict
    python replicate.py --arms VPO "Max@k" --jobs 2          others: see --help
    python replicate.py --collinear --jobs 2       the control: all components are their mean, nothing is to be gained
    python replicate.py --steps 8 --seeds 0 1      a look

All arms sample the same number of tokens for each step, to within the truncated completions: three answers take 19
tokens, one takes 4, so those that give one answer have 76 prompts a step where the others have 16. Pools are of 30
answers to 256 held-out prompts: 10 completions of three answers, or 30 of one. best@k is the exact expectation of the
highest mean of the components among k of them, coverage@k the same for other weights of the components, mean over 128
draws of uniform weights; diversity is the mean L1 distance of the components of two of them.

The policy: warm-started on worked answers of which half are random and half the best in one of the four components, so
that it knows what digits are worth and has not chosen; one for prompts of one answer, one for prompts of three.

Writes picks.json (evaluations of every run), picks.md and picks.png (means with 95 % confidence intervals over the seeds,
Student's t); with --collinear the same as collinear.*. Each run is a process with one thread, of about two minutes.
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
from intervals import half_width, shown  # noqa: E402

HERE = Path(__file__).resolve().parent
KS = (1, 2, 4, 8, 16, 30)
COMMON = [
    "task=digit_picks", "reward=picks", "lr=3e-4", "plugins.grpo.ddof=0", "plugins.grpo.eps=1e-6",
    "eval.prompts=256", "logger.trackers=[]", "logger.progress=false", "checkpoint.every=0", "resume=null",
]  # fmt: skip
ONE = ["max_completion_length=5", "prompts_per_step=76", "eval.samples=30", "eval.ks=[1]"]
THREE = ["task.answers=3", "max_completion_length=20", "prompts_per_step=16", "eval.samples=10", "eval.ks=[1]"]
ARMS = {
    "GRPO": ONE,
    "Multi-RLVR max": [*THREE, "algo=multi_rlvr"],
    "Multi-RLVR sum": [*THREE, "algo=multi_rlvr", "plugins.multi_rlvr.reduce=sum"],
    "Multi-RLVR sum, distinct": [*THREE, "algo=multi_rlvr", "plugins.multi_rlvr.reduce=sum", "plugins.multi_rlvr.distinct=true"],
    "VPO": [*THREE, "algo=vpo"],
    "VPO sobol": [*THREE, "algo=vpo", "plugins.vpo.sampler=sobol", "plugins.vpo.draws=64"],
    "Max@k": [*ONE, "algo=max_at_k"],
    "random weighting": [*ONE, "algo=random_weighting"],
}  # fmt: skip
MAIN = ("GRPO", "Multi-RLVR max", "VPO")
EVALUATED = (*(f"picks/{name}@{k}" for name in ("best", "coverage") for k in KS), "picks/diversity")
SUMMED = ("rollout/tokens", "time/step_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(MAIN), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--collinear", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/vpo"), help="of the runs; those that exist are kept")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    parser.add_argument("--warm-start", type=int, metavar="ANSWERS", help="make one warm start, in this process")
    args = parser.parse_args()
    policies = args.folder.resolve() / f"policy-{args.layers}x{args.width}"
    if args.warm_start is not None:
        return warm_start(policies / str(args.warm_start), args.warm_start, args.layers, args.width)
    suite = "collinear" if args.collinear else "picks"
    length = [f"steps={args.steps}", f"eval.every={max(args.steps // 4, 1)}"]
    common = [*COMMON, *length, f"task.collinear={str(args.collinear).lower()}"]
    jobs = [(name, seed) for seed in args.seeds for name in args.arms]
    folder = args.folder.resolve() / f"{suite}-{args.layers}x{args.width}-{args.steps}"
    with ThreadPoolExecutor(args.jobs) as pool:
        forms = {answers(name) for name in args.arms}
        list(pool.map(lambda m: ensure(policies / str(m), m, args), forms))
        places = list(pool.map(lambda job: run(folder, policies, common, *job), jobs))
    runs = [{"arm": name, "seed": seed, **read(place)} for (name, seed), place in zip(jobs, places, strict=True)]
    record = {"common": common, "arms": {name: ARMS[name] for name in args.arms}, "runs": runs}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{suite}.json").write_text(json.dumps(record) + "\n")
    (args.out / f"{suite}.md").write_text(text := table(suite, record))
    print(text)
    plot(record, args.out / f"{suite}.png")


def answers(name: str) -> int:
    """How many answers to a prompt an arm asks for."""
    return 3 if ARMS[name][: len(THREE)] == THREE else 1


def warm_start(place: Path, answers: int, layers: int, width: int) -> None:
    """A small policy that has seen answers of every kind."""
    from grpozoo.config import Model
    from grpozoo.models.warm_start import Recipe, train
    from grpozoo.tasks.digit_picks import DigitPicks

    task = DigitPicks(DigitPicks.Config(answers=answers, skilled=0.5))
    recipe = Recipe(target=1.0, cooldown=100, max_steps=700, every=700)  # the target is out of reach: 700 steps
    place.mkdir(parents=True, exist_ok=True)
    train(Model(layers=layers, width=width, heads=4), task, place, recipe)


def ensure(place: Path, answers: int, args: argparse.Namespace) -> None:
    """The warm start for prompts of so many answers, unless it is there."""
    if not (place / "recipe.json").exists():
        size = ["--layers", str(args.layers), "--width", str(args.width), "--folder", str(args.folder)]
        call([sys.executable, __file__, "--warm-start", str(answers), *size])
        print(f"warm start, answers={answers}: done", file=sys.stderr, flush=True)


def run(folder: Path, policies: Path, common: list[str], name: str, seed: int) -> Path:
    """One run, unless it is there."""
    place = folder / f"{name.replace(' ', '_').replace(',', '').replace('@', '_at_')}-{seed}"
    if not (place / "summary.json").exists():
        own = [f"model.path='{policies / str(answers(name))}'", f"seed={seed}", f"run_dir='{place}'"]
        call([sys.executable, "-m", "grpozoo", *common, *ARMS[name], *own])
        print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    return place


def call(command: list[str]) -> None:
    """In a process of one thread."""
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if answer.returncode:
        raise SystemExit(f"{' '.join(command)}\n{answer.stderr}")


def read(place: Path) -> dict[str, dict]:
    """series: name -> [[step, value], ...] of the evaluations; sums: name -> over all steps."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    series = {
        name: [[line["step"], round(line[name], 6)] for line in lines if isinstance(line.get(name), float)]
        for name in EVALUATED
    }
    return {"series": series, "sums": {name: round(sum(line.get(name, 0) for line in lines), 3) for name in SUMMED}}


def last(run: dict, metric: str) -> float:
    """The metric at the end of a run."""
    return run["series"][metric][-1][1]


def table(suite: str, record: dict) -> str:
    """One line for each metric: the starts, the arms, and VPO less the others, seed by seed."""
    arms = {name: [run for run in record["runs"] if run["arm"] == name] for name in record["arms"]}
    seeds = len({run["seed"] for run in record["runs"]})
    starts = {f"start, answers={answers(name)}": name for name in arms}
    own = {run["seed"]: run for run in arms.get("VPO", [])}
    others = [name for name in arms if own and name != "VPO"]
    head = ["at the end", *starts, *arms, *(f"VPO - {name}" for name in others)]
    lines = [
        f"# {suite}",
        "",
        f"`python replicate.py{' --collinear' * (suite == 'collinear')}`: {seeds} seeds; mean ± half the 95 % confidence interval (Student's t).",
        "Common options: `" + " ".join(record["common"]) + "`.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for metric in EVALUATED:
        cells = [f"{fmean(run['series'][metric][0][1] for run in arms[name]):.4f}" for name in starts.values()]
        cells += [shown([last(run, metric) for run in runs], 4) for runs in arms.values()]
        cells += [
            shown([last(own[run["seed"]], metric) - last(run, metric) for run in arms[name]], 4) for name in others
        ]
        lines.append(f"| {metric.removeprefix('picks/')} | " + " | ".join(cells) + " |")
    for name, metric, unit in (("million tokens", "rollout/tokens", 1e6), ("seconds", "time/step_s", 1)):
        cells = [shown([run["sums"][metric] / unit for run in runs], 2 if unit > 1 else 0) for runs in arms.values()]
        lines.append(f"| {name} |" + " |" * len(starts) + " " + " | ".join(cells) + " |" + " |" * len(others))
    lines += ["", "| arm | options |", "| --- | --- |"]
    lines += [f"| {arm} | `{' '.join(options)}` |" for arm, options in record["arms"].items()]
    return "\n".join(lines) + "\n"


def plot(record: dict, file: Path) -> None:
    """best@k and coverage@k at the end, and the diversity over the steps: means with 95 % intervals over the seeds."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(18, 4.5))
    for arm in record["arms"]:
        runs = [run for run in record["runs"] if run["arm"] == arm]
        for axis, name in ((left, "best"), (middle, "coverage")):
            draw(axis, KS, [[last(run, f"picks/{name}@{k}") for k in KS] for run in runs], arm)
        steps = [step for step, _ in runs[0]["series"]["picks/diversity"]]
        draw(right, steps, [[value for _, value in run["series"]["picks/diversity"]] for run in runs], arm)
    left.set(ylabel="best@k, mean of the components")
    middle.set(ylabel="coverage@k, mean over weights of the components")
    for axis in (left, middle):
        axis.set(xscale="log", xticks=KS, xticklabels=KS, xlabel="k, answers")
    right.set(xlabel="step", ylabel="diversity, L1 distance of two answers")
    left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def draw(axis, x, curves: list[list[float]], label: str) -> None:
    """Mean curve and interval."""
    columns = [list(column) for column in zip(*curves, strict=True)]
    low, high = ([fmean(column) + sign * half_width(column) for column in columns] for sign in (-1, 1))
    line = axis.plot(x, [fmean(column) for column in columns], label=label, marker=".")[0]
    axis.fill_between(x, low, high, alpha=0.15, color=line.get_color())


if __name__ == "__main__":
    main()
