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
        "groups": 16, "samples": 8, "completion": 24, "steps": 12, "micro": 0, "lr": 3e-4,
    },
    "smollm2": {
        "model": "smollm2", "task": ["task.level=1", "task.chat=true"],
        "groups": 8, "samples": 8, "completion": 32, "steps": 4, "micro": 0, "lr": 1e-5,
    },
}  # fmt: skip
CASES["smollm2_micro8"] = {**CASES["smollm2"], "micro": 8}  # TRL with less memory: eight forwards per update
SIDES = ("grpozoo", "trl")
FIGURES = {"seconds_per_step": "s per step", "tokens_per_second": "tokens/s in generation", "peak_mb": "peak memory, MB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run, the first one not counted; default: the case's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(args.threads), "results": {}}
    for name in args.cases:
        case = {**CASES[name], **({"steps": args.steps} if args.steps else {})}
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
        rest = {"grpozoo": case["task"], "trl": [f"--prompts={prompts}", f"--micro-batch={case['micro']}"]}
        for number in range(args.pairs):
            pair = {}
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                out = Path(folder, "result.json")
                file = "trl_side.py" if side == "trl" else "zoo_side.py"
                script(file, [*flags, f"--model={model}", f"--out={out}", *rest[side]], args)
                pair[side] = json.loads(out.read_text())
                print(name, number + 1, side, *(f"{title}: {pair[side][figure]:.3f}" for figure, title in FIGURES.items()), flush=True)
            done.append(pair)
    return done


def script(file: str, flags: list[str], args: argparse.Namespace) -> str:
    """Run one of our scripts to its end and return what it printed; what it complained of is shown if it fails.

    The peak memory of a process begins with that of its parent, so this process imports nothing heavy.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    result = subprocess.run([sys.executable, str(HERE / file), *flags], env=environment, text=True, capture_output=True)
    if result.returncode:
        sys.exit(f"{file} {' '.join(flags)}\nended with status {result.returncode}\n{result.stdout}\n{result.stderr[-3000:]}")
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
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, result in report["results"].items():
        for figure, title in FIGURES.items():
            values = {side: [pair[side][figure] for pair in result["pairs"]] for side in SIDES}
            ours, theirs = (statistics.median(values[side]) for side in SIDES)
            ratios = [better(figure, a, b) for a, b in zip(*values.values(), strict=True)]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {name} | {title} | {ours:.4g} | {theirs:.4g} | {better(figure, ours, theirs):.2f} | {each} |")
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    note = "A ratio above 1 says that grpozoo is that many times better: faster, or smaller."
    return "\n".join([*lines, "", note, "", f"Machine: {about}", ""])


def better(figure: str, ours: float, theirs: float) -> float:
    """How many times better ours is."""
    return ours / theirs if figure == "tokens_per_second" else theirs / ours


def plot(report: dict, path: Path) -> None:
    """One panel per figure, a bar per side and case with a dot for each run; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(FIGURES), figsize=(12, 3.2), layout="constrained")
    for panel, (key, title) in zip(panels, FIGURES.items(), strict=True):
        for shift, side in zip((-0.2, 0.2), SIDES, strict=True):
            for at, result in enumerate(report["results"].values()):
                values = [pair[side][key] for pair in result["pairs"]]
                color = "tab:blue" if side == "grpozoo" else "tab:gray"
                panel.bar(at + shift, statistics.median(values), 0.4, color=color, label=side if at == 0 else None)
                panel.plot([at + shift] * len(values), values, ".", color="black", markersize=4)
        panel.set(title=title, yscale="log", xticks=range(len(report["results"])))
        panel.set_xticklabels(report["results"], fontsize=8)
    panels[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
