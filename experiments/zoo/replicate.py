"""Small replications of what the papers of the zoo claim: the same runs, several seeds, one method exchanged.

    python replicate.py entropy --jobs 2            STARE and its rivals: entropy, diversity, accuracy
    python replicate.py gspo --jobs 2               the sequence ratio with four updates per batch
    python replicate.py family --jobs 2             every advantage and surrogate at one update per batch
    python replicate.py length --jobs 2             what the aggregation does to the length of wrong answers
    python replicate.py SUITE --arms grpo stare     some arms only; runs that exist in --folder are not repeated

Writes SUITE.json (numbers of every run), SUITE.md (means with 95 % confidence intervals over the seeds, Student's t)
and SUITE.png. Each run is a process with one thread; --jobs says how many at a time.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median

sys.path.append(str(Path(__file__).resolve().parents[1]))
from intervals import shown  # noqa: E402

HERE = Path(__file__).resolve().parent
LOGGER = ["logger.trackers=[]", "logger.progress=false", "checkpoint.every=0"]
DIGITS = [
    "task=digit_sum", "model.layers=2", "model.width=64", "max_completion_length=20", "lr=2e-4", "steps=400",
    "eval.prompts=0", "eval.samples=32", "eval.ks=[1,8,32]", "eval.every=100",
]  # fmt: skip
SUMS = [
    "task.level=1", "model.layers=2", "model.width=64", "max_completion_length=16", "lr=2e-4", "steps=150",
    "eval.prompts=128", "eval.samples=8", "eval.ks=[1,8]", "eval.every=50",
]  # fmt: skip
FOUR = ["update.mini_batches=4"]
W6 = ["algo=stare", "plugins.stare.target_entropy=1.2", "plugins.stare.reweight_w=6", "plugins.stare.w_star_every=20"]
SUITES = {
    "entropy": (
        DIGITS,
        {
            "GRPO": ["plugins.grpo.aggregation=token_mean"],
            "entropy bonus .02": ["algo=[entropy_bonus,aggregation]", "plugins.entropy_bonus.coef=0.02"],
            "adaptive coefficient": ["algo=[adaptive_entropy,aggregation]", "plugins.adaptive_entropy.target=1.2", "plugins.adaptive_entropy.delta=2e-3", "plugins.adaptive_entropy.coef_max=0.1"],
            "STARE O1 W=1.1": [*W6, "plugins.grpo.aggregation=token_mean", "plugins.stare.reweight_w=1.1"],
            "STARE O1 W=6": [*W6, "plugins.grpo.aggregation=token_mean"],
            "STARE C2 W=4 M=.2": [*W6, "plugins.grpo.aggregation=token_mean", "plugins.stare.variant=C2", "plugins.stare.reweight_w=4", "plugins.stare.reweight_m=0.2"],
            "GRPO x4": [*FOUR, "plugins.grpo.aggregation=token_mean"],
            "clip-higher x4": [*FOUR, "algo=[clip_higher,aggregation]"],
            "KL-Cov x4": [*FOUR, "algo=[kl_cov,aggregation]", "plugins.kl_cov.share=0.01"],
            "STARE O1 W=6 x4": [*W6, *FOUR, "plugins.grpo.aggregation=token_mean"],
        },
    ),
    "gspo": (
        [*SUMS, *FOUR],
        {
            "GRPO .2/.2": [],
            "GSPO 3e-4/4e-4": ["algo=gspo_paper"],
            "GSPO .05/.05": ["algo=gspo"],
            "GSPO-token .05/.05": ["algo=gspo_token"],
            "LUSPO": ["algo=luspo"],
            "CISPO": ["algo=cispo"],
            "SAPO": ["algo=sapo"],
            "GMPO": ["algo=gmpo"],
        },
    ),
    "family": (
        SUMS,
        {
            name: [f"algo={name}"]
            for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "bnpo", "opo", "max_rl",
                         "passk", "remax", "mgpo", "dapo", "luffy")
        }  # fmt: skip
        | {"ppo lam .95": ["algo=ppo"], "ppo lam 1": ["algo=ppo", "plugins.ppo.lam=1"]},
    ),
    "length": (
        [*DIGITS, "logger.completions=-1"],
        {
            "seq_mean": [],
            "token_mean": ["plugins.grpo.aggregation=token_mean"],
            "const_len": ["plugins.grpo.aggregation=const_len"],
            "Dr. GRPO": ["algo=dr_grpo"],
        },
    ),
}  # fmt: skip
COLUMNS = {  # heading -> (metric, how its values over a run become a number, digits)
    "entropy": {
        "entropy, mid": ("rollout/entropy", "mid", 2), "entropy, end": ("rollout/entropy", "end", 2),
        "accuracy": ("heldout/avg@32", "last", 3), "pass@8": ("heldout/pass@8", "last", 3),
        "distinct": ("heldout/distinct", "last", 1), "gate duty": ("stare/duty", "last", 2),
        "w*, median": ("stare/w_star", "median", 1),
    },
    "gspo": {
        "train reward, end": ("reward/answer_mean", "end", 3), "accuracy": ("heldout/avg@8", "evals", 3),
        "greedy": ("heldout/accuracy", "evals", 3), "gradient norm": ("update/grad_norm", "mean", 3),
    },
    "family": {
        "start": ("heldout/avg@8", "first", 3), "accuracy": ("heldout/avg@8", "last", 3),
        "greedy": ("heldout/accuracy", "last", 3), "pass@8": ("heldout/pass@8", "last", 3),
        "equal groups, end": ("groups/equal", "end", 2),
    },
    "length": {
        "wrong, start": ("wrong/length", "head", 2), "wrong, end": ("wrong/length", "end", 2),
        "all, end": ("rollout/length_mean", "end", 2), "accuracy": ("heldout/avg@32", "last", 3),
    },
}  # fmt: skip
CURVES = {"entropy": ("rollout/entropy", "heldout/distinct"), "gspo": ("reward/answer_mean", "heldout/avg@8"), "family": ("heldout/avg@8",), "length": ("wrong/length",)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", help="null: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/replications"))
    args = parser.parse_args()
    common, arms = SUITES[args.suite]
    names = args.arms or list(arms)
    jobs = [(name, seed) for seed in args.seeds for name in names]
    folder = args.folder.resolve() / args.suite
    with ThreadPoolExecutor(args.jobs) as pool:
        places = list(pool.map(lambda job: run(folder, [*common, *arms[job[0]]], *job), jobs))
    runs = [{"arm": name, "seed": seed, **read(place)} for (name, seed), place in zip(jobs, places, strict=True)]
    record = {"common": common, "arms": {name: arms[name] for name in names}, "runs": runs}
    numbers = [{"arm": one["arm"], "seed": one["seed"], **summary(args.suite, one["series"])} for one in runs]
    (HERE / f"{args.suite}.json").write_text(json.dumps({**record, "runs": numbers}, indent=1) + "\n")
    (HERE / f"{args.suite}.md").write_text(text := table(args.suite, record))
    print(text)
    plot(args.suite, record, HERE / f"{args.suite}.png")


def run(folder: Path, overrides: list[str], name: str, seed: int) -> Path:
    """One run, unless it is there."""
    place = folder / f"{name.replace(' ', '_').replace('/', '_')}-{seed}"
    if not (place / "summary.json").exists():
        command = [
            sys.executable,
            "-m",
            "grpozoo",
            *LOGGER,
            *overrides,
            f"seed={seed}",
            f"run_dir='{place}'",
            "resume=null",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment)
        if answer.returncode:
            raise SystemExit(f"{' '.join(command)}\n{answer.stderr}")
        print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    return place


WANTED = ("rollout/entropy", "rollout/length_mean", "reward/answer_mean", "groups/equal", "update/grad_norm", "time/step_s", "stare/", "heldout/")  # fmt: skip


def read(place: Path) -> dict:
    """Series of the wanted metrics: name -> [[step, value], ...]."""
    series: dict[str, list] = {}
    for line in map(json.loads, (place / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name.startswith(WANTED) and isinstance(value, (int, float)):
                series.setdefault(name, []).append([line["step"], round(value, 6)])
    completions = place / "completions.jsonl"
    if completions.exists():
        lengths: dict[int, list[int]] = {}
        for row in map(json.loads, completions.read_text().splitlines()):
            if row["total"] == 0:
                lengths.setdefault(row["step"], []).append(row["length"])
        series["wrong/length"] = [[step, fmean(values)] for step, values in sorted(lengths.items())]
    return {"series": series}


def number(series: list, how: str) -> float | None:
    """One number of a run. end, head: mean of the last (first) tenth of the steps; mid: of the tenth around the middle;
    evals: mean of the last two evaluations."""
    values = [value for _, value in series]
    if not values:
        return None
    tenth = max(len(values) // 10, 1)
    middle = len(values) // 2
    parts = {"end": values[-tenth:], "head": values[:tenth], "mid": values[middle - tenth // 2 : middle + tenth // 2 + 1],
             "last": values[-1:], "first": values[:1], "evals": values[-2:], "mean": values}  # fmt: skip
    return {"sum": sum, "median": median}[how](values) if how in ("sum", "median") else fmean(parts[how])


def summary(suite: str, series: dict) -> dict[str, float | None]:
    """The columns of one run."""
    return {name: number(series.get(metric, []), how) for name, (metric, how, _) in COLUMNS[suite].items()}


def table(suite: str, record: dict) -> str:
    """Mean +- 95 % interval over the seeds, one line for each arm."""
    columns = COLUMNS[suite]
    seeds = sorted({run["seed"] for run in record["runs"]})
    lines = [
        f"# {suite}",
        "",
        f"`python replicate.py {suite}`: {len(seeds)} seeds, mean ± half the 95 % confidence interval over them (Student's t).",
        "Common options: `" + " ".join(record["common"]) + "`.",
        "",
        "| arm | " + " | ".join(columns) + " |",
        "|" + " --- |" * (len(columns) + 1),
    ]
    for arm in record["arms"]:
        cells = []
        found = [summary(suite, run["series"]) for run in record["runs"] if run["arm"] == arm]
        for name, (_, _, digits) in columns.items():
            values = [numbers[name] for numbers in found if numbers[name] is not None]
            cells.append(shown(values, digits))
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", "| arm | options |", "| --- | --- |"]
    lines += [f"| {arm} | `{' '.join(options) or 'none'}` |" for arm, options in record["arms"].items()]
    return "\n".join(lines) + "\n"


def plot(suite: str, record: dict, file: Path) -> None:
    """Mean curves with the range of the seeds."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES[suite]), figsize=(6.5 * len(CURVES[suite]), 4.5), squeeze=False)
    for axis, metric in zip(axes[0], CURVES[suite], strict=True):
        for arm in record["arms"]:
            series = [run["series"].get(metric, []) for run in record["runs"] if run["arm"] == arm]
            steps = sorted(set.intersection(*({step for step, _ in one} for one in series))) if series else []
            if not steps:
                continue
            tables = [dict(map(tuple, one)) for one in series]
            smooth = max(len(steps) // 25, 1)
            chunks = [steps[i : i + smooth] for i in range(0, len(steps), smooth)]
            x = [chunk[len(chunk) // 2] for chunk in chunks]
            per_seed = [[fmean(one[step] for step in chunk) for chunk in chunks] for one in tables]
            mean = [fmean(column) for column in zip(*per_seed, strict=True)]
            line = axis.plot(x, mean, label=arm)[0]
            axis.fill_between(
                x,
                *zip(*((min(c), max(c)) for c in zip(*per_seed, strict=True)), strict=True),
                alpha=0.12,
                color=line.get_color(),
            )
        axis.set_xlabel("step")
        axis.set_ylabel(metric)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
