"""grpozoo and TRL's GRPOTrainer in pairs: seconds per step, tokens per second in generation, peak memory.

    python compare.py tiny smollm2 smollm2_micro8 --pairs 3

Both train the same folder of weights on the same prompts in the same order with the same reward. Each measurement is a
process of its own, and the two sides take turns (A B, B A, A B, ...), so that a machine that slows down slows both.
Writes every number to results.json, the table to results.md, and results.png if matplotlib is there.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = {  # micro: completions in one forward of TRL's update, 0 for the whole batch
    "tiny": {
        "model": "tiny", "task": ["task.level=2"],
        "groups": 16, "samples": 8, "completion": 28, "steps": 12, "micro": 0, "lr": 3e-4, "reward": "right",
    },
    "smollm2": {
        "model": "smollm2", "task": ["task.level=1", "task.chat=true"],
        "groups": 8, "samples": 8, "completion": 32, "steps": 4, "micro": 0, "lr": 1e-5, "reward": "right",
    },
}  # fmt: skip
CASES["smollm2_micro8"] = {**CASES["smollm2"], "micro": 8}  # TRL with less memory: eight forwards per update
for _name in ("tiny", "smollm2"):  # a reward that never ties: grpozoo has no rows of advantage zero to leave out
    CASES[f"{_name}_dense"] = {**CASES[_name], "reward": "dense"}
REWARDS = {  # grpozoo's options for the reward functions of trl_side.py
    "right": ["reward=answer"],
    "dense": ["reward=function", f"plugins.function.path={HERE}/trl_side.py:dense"],
}
SIDES = ("grpozoo", "trl")
FIGURES = {"seconds_per_step": "s per step", "tokens_per_second": "tokens/s generating", "peak_mb": "peak memory, MB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run, the first one not counted; default: the case's")
    parser.add_argument("--model", help="a folder with safetensors, instead of the case's own model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(args.threads), "results": {}}
    for name in args.cases:
        given = {key: getattr(args, key) for key in ("steps", "model") if getattr(args, key)}
        case = {**CASES[name], **given}
        report["results"][name] = {"case": case, "pairs": pairs(name, case, args)}
        (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")  # after each case: they are long
        (args.out / "results.md").write_text(table(report))
    print(table(report))
    plot(report, args.out / "results.png")


def pairs(name: str, case: dict, args: argparse.Namespace) -> list[dict]:
    """[{"grpozoo": result, "trl": result}, ...]; the side that goes first alternates."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        prompts = f"{folder}/prompts.jsonl"
        flags = [f"--{key}={case[key]}" for key in ("steps", "groups", "samples", "completion", "lr")]
        flags += [f"--seed={args.seed}", f"--threads={args.threads}"]
        prepare = [*flags, f"--model={case['model']}", f"--prompts={prompts}", *case["task"]]
        model = script("zoo_side.py", prepare, args).strip().splitlines()[-1]
        rest = {
            "grpozoo": [*case["task"], *REWARDS[case["reward"]]],
            "trl": [f"--prompts={prompts}", f"--micro-batch={case['micro']}", f"--reward={case['reward']}"],
        }
        for number in range(args.pairs):
            pair = {}
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                out = Path(folder, "result.json")
                file = "trl_side.py" if side == "trl" else "zoo_side.py"
                script(file, [*flags, f"--model={model}", f"--out={out}", *rest[side]], args)
                pair[side] = json.loads(out.read_text())
                shown = [f"{title}: {pair[side][figure]:.4g}" for figure, title in FIGURES.items()]
                print(name, number + 1, side, *shown, sep="  ", flush=True)
            done.append(pair)
    return done


def script(file: str, flags: list[str], args: argparse.Namespace) -> str:
    """Run one of our scripts to its end and return what it printed; what it complained of is shown if it fails.

    The peak memory of a process begins with that of its parent, so this process imports nothing heavy.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    result = subprocess.run([sys.executable, str(HERE / file), *flags], env=environment, text=True, capture_output=True)
    if result.returncode:
        sys.exit(f"{file} {' '.join(flags)}\nended with {result.returncode}\n{result.stdout}\n{result.stderr[-3000:]}")
    return result.stdout


def machine(threads: int) -> dict:
    """What the numbers depend on."""
    names = ("grpozoo", "trl", "transformers", "accelerate", "torch")
    return {
        "cpus": os.cpu_count(),
        "threads": threads,
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def table(report: dict) -> str:
    """Medians over the runs, and the ratio of every pair, as Markdown."""
    head = ["case", "figure", *SIDES, "ratio of medians", "ratio of each pair"]
    notes = ["A ratio above 1 says that grpozoo is that many times better: faster, or smaller."]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, result in report["results"].items():
        for figure, title in FIGURES.items():
            values = {side: [pair[side][figure] for pair in result["pairs"]] for side in SIDES}
            ours, theirs = (statistics.median(values[side]) for side in SIDES)
            ratios = [better(figure, a, b) for a, b in zip(*values.values(), strict=True)]
            each, whole = ", ".join(f"{ratio:.2f}" for ratio in ratios), better(figure, ours, theirs)
            lines.append(f"| {name} | {title} | {ours:.4g} | {theirs:.4g} | {whole:.2f} | {each} |")
        rows = [share for pair in result["pairs"] for share in pair["grpozoo"]["skipped_rows"][1:]]
        notes.append(f"{name}: grpozoo left {statistics.mean(rows):.0%} of the rows out of the update, advantage zero.")
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    return "\n".join([*lines, "", *notes, "", f"Machine: {about}", ""])


def better(figure: str, ours: float, theirs: float) -> float:
    """How many times better ours is."""
    return ours / theirs if figure == "tokens_per_second" else theirs / ours


def plot(report: dict, path: Path) -> None:
    """How many times better, a bar per case and figure with a dot for each pair; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    for shift, (key, title) in zip((-0.27, 0, 0.27), FIGURES.items(), strict=True):
        for at, result in enumerate(report["results"].values()):
            values = [tuple(pair[side][key] for side in SIDES) for pair in result["pairs"]]
            whole = better(key, *map(statistics.median, zip(*values, strict=True)))
            color = f"C{list(FIGURES).index(key)}"
            axes.bar(at + shift, whole, 0.25, color=color, label=title if at == 0 else None)
            axes.plot([at + shift] * len(values), [better(key, *pair) for pair in values], "k.", markersize=4)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(report["results"])), report["results"])
    axes.set_ylabel("grpozoo over TRL, times better")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
