"""Does it learn? The claims of the README, as commands: held-out accuracy before and after, for several seeds.

    python learn.py tiny --seeds 0 1 2            the main job
    python learn.py smollm2 --seeds 0             a real instruct model on two-operand addition in chat format
    python learn.py tiny --collect FOLDER ...     only tabulate runs that exist

Writes NAME.json (every evaluation of every run), NAME.md (the table) and NAME.png (the curves, if matplotlib is there).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = {
    "tiny": [],
    "smollm2": [
        "model=smollm2", "task.terms=2", "task.chat=true", "prompts_per_step=8", "group_size=8", "max_completion_length=32",
        "lr=2e-5", "steps=40", "eval.prompts=48", "eval.samples=4", "eval.ks=[1,4]", "eval.every=20", "checkpoint.every=0",
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--collect", type=Path, nargs="+", help="run folders, instead of running")
    args = parser.parse_args()
    folders = args.collect or [run(args.case, seed) for seed in args.seeds]
    runs = [read(folder) for folder in folders]
    command = " ".join(["python -m grpozoo seed=SEED", *CASES[args.case]])
    (HERE / f"{args.case}.json").write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")
    (HERE / f"{args.case}.md").write_text(text := table(command, runs))
    print(text)
    plot(runs, HERE / f"{args.case}.png")


def run(case: str, seed: int) -> Path:
    folder = Path(tempfile.mkdtemp()) / f"{case}-{seed}"
    subprocess.run([sys.executable, "-m", "grpozoo", *CASES[case], f"seed={seed}", f"run_dir={folder}"], check=True)
    return folder


def read(folder: Path) -> dict:
    """Summary, seed, and every held-out evaluation of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    heldout = [
        {"step": line["step"], **{name: value for name, value in line.items() if name.startswith("heldout/")}}
        for line in lines
        if "heldout/accuracy" in line
    ]
    seed = json.loads((folder / "manifest.json").read_text())["seed"]
    summary = json.loads((folder / "summary.json").read_text())
    del summary["model"]  # a path on this machine
    return {"seed": seed, "summary": summary, "heldout": heldout}


def table(command: str, runs: list[dict]) -> str:
    rows = [
        "| seed | greedy, start -> end | sampled, start -> end | seconds | peak memory, MB |",
        "|---|---|---|---|---|",
    ]
    for one in runs:
        first, last = one["heldout"][0], one["heldout"][-1]
        sampled = next(name for name in first if name.startswith("heldout/avg@"))
        change = [f"{first[name]:.1%} -> {last[name]:.1%}" for name in ("heldout/accuracy", sampled)]
        summary = one["summary"]
        rows.append(
            f"| {one['seed']} | {change[0]} | {change[1]} | {summary['seconds']:.0f} | {summary['peak_memory_mb']:.0f} |"
        )
    return f"`{command}`\n\n" + "\n".join(rows) + "\n"


def plot(runs: list[dict], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for one in runs:
        steps = [line["step"] for line in one["heldout"]]
        axes.plot(
            steps, [100 * line["heldout/accuracy"] for line in one["heldout"]], marker="o", label=f"seed {one['seed']}"
        )
    axes.set(xlabel="step", ylabel="held-out greedy accuracy, %", ylim=(0, 100))
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
