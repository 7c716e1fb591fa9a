"""grpozoo's public command line on a task: seconds per step, generation speed, peak memory, as one JSON file.

Run by compare.py as a process of its own; it starts `python -m grpozoo` with nothing but options that every user has,
and reads its metrics.jsonl. Evaluation and checkpoints, which the other side does not have, are reduced to those that
cannot be switched off (8 prompts, greedy, before and after; a checkpoint at the end); no step's time includes them.
Peak memory is that of the whole process, evaluation and final checkpoint included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder with safetensors; with --prompts also tiny, smollm2")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--prompts", help="run nothing: write the run's prompts as JSONL, print the model's folder")
    parser.add_argument("--steps", type=int, default=10, help="the first one is warm-up and not counted")
    parser.add_argument("--groups", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--completion", type=int, default=24, help="longest completion, tokens")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="of grpozoo, such as task.level=2")
    return parser.parse_args()


def command(args: argparse.Namespace, run_dir: str | Path) -> list[str]:
    """The command line of one run."""
    return [
        sys.executable, "-m", "grpozoo", f"model.path={args.model}", f"run_dir={run_dir}", f"steps={args.steps}",
        f"prompts_per_step={args.groups}", f"group_size={args.samples}", f"max_completion_length={args.completion}",
        f"lr={args.lr}", f"seed={args.seed}", "logger=files", "logger.completions=0", "logger.progress=false",
        "eval.every=0", "eval.prompts=8", "eval.samples=0", "checkpoint.every=0", *args.overrides,
    ]  # fmt: skip


def prepare(args: argparse.Namespace) -> str:
    """Write the prompts of the run in their order, for the other side; the folder of the model, made if need be."""
    from grpozoo import models
    from grpozoo.compose.command import compose
    from grpozoo.compose.task import load_task
    from grpozoo.config import Model
    from grpozoo.models import warm_start
    from grpozoo.run.prompts import PromptStream

    task = load_task(compose(args.overrides).task)
    prompts = PromptStream(task.train, args.seed).take(args.groups * args.steps)
    rows = [{"prompt": p.text or list(p.messages), "answer": p.answer} for p in prompts]
    Path(args.prompts).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.model == "smollm2":
        return str(models.smollm2_folder())
    return str(warm_start.ensure(Model(), task) if args.model == "tiny" else args.model)


def measure(args: argparse.Namespace) -> dict:
    """Train, and return what was measured; every list has one number per step."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command(args, folder), env=environment, cwd=folder, check=True)
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    start, steps = lines[0], lines[1:]
    ends = [start["seconds"], *(line["seconds"] for line in steps)]  # wall clock, writing the line before included
    step = [b - a - line.get("time/eval_s", 0.0) for a, b, line in zip(ends, ends[1:], steps, strict=False)]
    generate = [line["time/generate_s"] for line in steps]
    tokens = [round(line["rollout/tokens"]) for line in steps]
    return {
        "side": "grpozoo",
        "step_s": step[1:],  # without the first
        "generate_s": generate,
        "update_s": [line["time/update_s"] for line in steps],
        "completion_tokens": tokens,
        "reward": [line["reward/total_mean"] for line in steps],
        "skipped_rows": [line["update/skipped_rows"] for line in steps],
        "seconds_per_step": statistics.median(step[1:]),
        "tokens_per_second": sum(tokens[1:]) / sum(generate[1:]),
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6,  # Linux counts KiB
    }


if __name__ == "__main__":
    options = arguments()
    if options.prompts:
        print(prepare(options))
    else:
        result = measure(options)
        Path(options.out).write_text(json.dumps(result, indent=1))
        print({name: result[name] for name in ("seconds_per_step", "tokens_per_second", "peak_mb")})
