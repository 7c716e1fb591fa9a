"""GRPO with coupled rollouts: steps to equal held-out accuracy, and the share of groups that teach nothing.

    python replicate.py --jobs 2                    task `short` of policies.py, 5 seeds, all arms
    python replicate.py --arms iid stratified       some arms only; runs that exist in --folder are not repeated

Every arm is the same run but for its sampler (and baseline). Steps to a threshold are read off the held-out accuracy of
a sample, avg@8, interpolated between evaluations. It is unbiased for every sampler, and noisier with independent ones,
which can only let them cross a threshold sooner. Writes replicate.json, replicate.md (means with 95 % intervals over the seeds,
Student's t; differences to iid are paired by seed) and replicate.png. One thread for each run; --jobs runs at a time.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import policies

sys.path.append(str(Path(__file__).resolve().parents[1]))
from intervals import shown  # noqa: E402

HERE = Path(__file__).resolve().parent
COMMON = [
    "task.level=1", "task.scratchpad=false", "max_completion_length=6", "prompts_per_step=32", "group_size=8", "lr=1e-3",
    "steps=120", "eval.every=5", "eval.prompts=256", "eval.samples=8", "eval.ks=[1,8]",
    "logger.trackers=[]", "logger.progress=false", "checkpoint.every=0",
]  # fmt: skip
CENTER = ["algo=coupled"]
ARMS = {
    "iid": CENTER,
    "stratified": [*CENTER, "sampler=qmc"],
    "lattice": [*CENTER, "sampler=qmc", "plugins.qmc.design=lattice"],
    "token_sobol": [*CENTER, "sampler=qmc", "plugins.qmc.design=token_sobol"],
    "cross_block": [*CENTER, "sampler=qmc", "plugins.qmc.blocks=2", "plugins.coupled.baseline=cross_block"],
    "iid, std": [],
    "stratified, std": ["sampler=qmc"],
}
THRESHOLDS = (0.2, 0.25, 0.3, 0.35)
ACCURACY = "heldout/avg@8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/quasimotto"))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--max-steps", type=int, help="of the warm start; null: the recipe's")
    parser.add_argument("overrides", nargs="*", help="further KEY=VALUE for every run")
    args = parser.parse_args()
    _, start, _ = policies.policy("short", warm_steps=args.max_steps)
    common = [*COMMON, *args.overrides]
    jobs = [(arm, seed) for seed in args.seeds for arm in args.arms]
    with ThreadPoolExecutor(args.jobs) as pool:
        places = list(pool.map(lambda job: run(args.folder.resolve(), start, common, *job), jobs))
    runs = [{"arm": arm, "seed": seed, "series": read(place)} for (arm, seed), place in zip(jobs, places, strict=True)]
    record = {"common": common, "arms": {arm: ARMS[arm] for arm in args.arms}, "runs": runs}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "replicate.json").write_text(json.dumps({**record, "runs": columns(record)}, indent=1) + "\n")
    (args.out / "replicate.md").write_text(text := table(record))
    print(text)
    plot(record, args.out / "replicate.png")


def run(folder: Path, start: Path, common: list[str], arm: str, seed: int) -> Path:
    """One run, unless it is there."""
    place = folder / f"{arm.replace(', ', '-')}-{seed}"
    if not (place / "summary.json").exists():
        options = [f"model.path='{start}'", *common, *ARMS[arm], f"seed={seed}", f"run_dir='{place}'", "resume=null"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "grpozoo", *options]
        answer = subprocess.run(command, capture_output=True, text=True, env=environment)
        if answer.returncode:
            raise SystemExit(f"{' '.join(command)}\n{answer.stderr}")
        print(f"{arm}, seed {seed}: done", file=sys.stderr, flush=True)
    return place


def read(place: Path) -> dict[str, list]:
    """name -> [[step, value], ...] of the metrics that are reported."""
    series: dict[str, list] = {}
    for line in map(json.loads, (place / "metrics.jsonl").read_text().splitlines()):
        for name in (
            "groups/equal",
            "groups/all_wrong",
            "groups/all_right",
            ACCURACY,
            "time/generate_s",
            "time/step_s",
        ):
            if isinstance(line.get(name), (int, float)):
                series.setdefault(name, []).append([line["step"], round(line[name], 6)])
    return series


def steps_to(series: list, threshold: float) -> float:
    """The step at which the accuracy first reaches the threshold, linear between evaluations; NaN: never."""
    for (before, low), (after, high) in zip(series, series[1:], strict=False):
        if low < threshold <= high:
            return before + (after - before) * (threshold - low) / (high - low)
    return 0.0 if series[0][1] >= threshold else float("nan")


def columns(record: dict) -> dict[str, dict[str, dict[int, float]]]:
    """heading -> arm -> seed -> number."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for one in record["runs"]:
        series = one["series"]
        equal = [value for _, value in series["groups/equal"]]
        row = {f"steps to {x}": steps_to(series[ACCURACY], x) for x in THRESHOLDS}
        row |= {"accuracy, start": series[ACCURACY][0][1], "accuracy, end": series[ACCURACY][-1][1]}
        row |= {"dead groups, first 20 steps": fmean(equal[:20]), "dead groups, all steps": fmean(equal)}
        for heading, value in row.items():
            found.setdefault(heading, {}).setdefault(one["arm"], {})[one["seed"]] = value
    return found


def table(record: dict) -> str:
    seeds = len({one["seed"] for one in record["runs"]})
    found = columns(record)
    lines = [
        "# GRPO with coupled rollouts",
        "",
        f"`python replicate.py`: {seeds} seeds, mean ± half the 95 % confidence interval (Student's t).",
    ]
    lines += ["Common options: `" + " ".join(record["common"]) + "`.", ""]
    lines += ["| arm | " + " | ".join(found) + " |", "|" + " --- |" * (len(found) + 1)]
    for arm in record["arms"]:
        cells = [shown(list(by[arm].values()), 1 if "steps to" in heading else 3) for heading, by in found.items()]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", "Steps as a share of those of independent rollouts with the same baseline, paired by seed:", ""]
    lines += ["| arm | " + " | ".join(map(str, THRESHOLDS)) + " |", "|" + " --- |" * (len(THRESHOLDS) + 1)]
    for arm in record["arms"]:
        base = "iid, std" if arm.endswith(", std") else "iid"
        if arm == base or base not in record["arms"]:
            continue
        cells = []
        for x in THRESHOLDS:
            own, other = found[f"steps to {x}"][arm], found[f"steps to {x}"][base]
            cells.append(shown([own[seed] / other[seed] if other[seed] else float("nan") for seed in own], 2))
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", "| arm | options |", "| --- | --- |"]
    lines += [f"| {arm} | `{' '.join(options) or 'none'}` |" for arm, options in record["arms"].items()]
    return "\n".join(lines) + "\n"


def plot(record: dict, file: Path) -> None:
    """Mean over the seeds of accuracy and of dead groups."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.5))
    for axis, metric in zip(axes, (ACCURACY, "groups/equal"), strict=True):
        for arm in record["arms"]:
            every = [dict(map(tuple, one["series"][metric])) for one in record["runs"] if one["arm"] == arm]
            steps = sorted(set.intersection(*map(set, every)))
            chunks = [steps[i : i + 5] for i in range(0, len(steps), 5)] if metric != ACCURACY else [[s] for s in steps]
            mean = [fmean(one[step] for one in every for step in chunk) for chunk in chunks]
            axis.plot([fmean(chunk) for chunk in chunks], mean, label=arm)
        axis.set(xlabel="step", ylabel=metric)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
