"""What `sampler=qmc` costs: generation timed in pairs against `sampler=iid`, same prompts, same number of tokens.

    python overhead.py                       tiny policy and SmolLM2, all designs
    python overhead.py tiny --pairs 10 --designs stratified

Rows never stop, so both sides decode the same number of tokens. The order within a pair alternates. Writes overhead.json
and overhead.md: median of the paired ratios qmc / iid, and the 95 % interval of that median (bootstrap over pairs).
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from grpozoo import Request
from grpozoo.compose.command import compose
from grpozoo.compose.plugins import activate
from grpozoo.compose.settings import read
from grpozoo.models.loading import load
from grpozoo.policy.policy import Policy
from grpozoo.rollout import decode
from grpozoo.sampling import Law

HERE = Path(__file__).resolve().parent
MODELS = {  # name -> (overrides, prompts, group size, tokens)
    "tiny": ([], 16, 8, 64),
    "smollm2": (["model=smollm2", "task.chat=true"], 4, 8, 24),
}
DESIGNS = ("stratified", "lattice", "token_sobol")
BOOTSTRAPS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; null: all")
    parser.add_argument("--designs", nargs="+", default=DESIGNS)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for name in args.models for row in measure(name, args.designs, args.pairs)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "overhead.json").write_text(json.dumps({"threads": args.threads, "rows": rows}) + "\n")
    (args.out / "overhead.md").write_text(text := table(rows, args.threads))
    print(text)


def measure(name: str, designs: list[str], pairs: int) -> list[dict]:
    """One line for each design."""
    overrides, prompts, siblings, tokens = MODELS[name]
    settings = read(compose(overrides))
    model, tokenizer = load(settings.config.model, settings.task)
    policy = Policy(model, tokenizer, Law(1.0))
    policy.stop_ids = frozenset()
    asked = [Request(settings.task.train[i], i, tuple(range(siblings))) for i in range(prompts)]

    def seconds(overrides: list[str], step: int) -> float:
        sampler = activate(compose(overrides).plugins).hooks.token_sampler(run=None)
        started = time.perf_counter()
        decode(asked, sampler, Law(1.0), policy, max_tokens=tokens, max_prompt_length=1024, seed=0, step=step)
        return time.perf_counter() - started

    rows = []
    for design in designs:
        sides = (["sampler=iid"], ["sampler=qmc", f"plugins.qmc.design={design}"])
        for side in sides:
            seconds(side, 0)  # warm-up
        times = []
        for pair in range(1, pairs + 1):
            turn = (0, 1) if pair % 2 else (1, 0)
            found = {side: seconds(sides[side], pair) for side in turn}
            times.append([found[0], found[1]])
        rows.append({"model": name, "design": design, "rows": prompts * siblings, "tokens": tokens, "times": times})
    return rows


def table(rows: list[dict], threads: int) -> str:
    rng = np.random.default_rng(0)
    lines = [
        "# Overhead of `sampler=qmc` in generation",
        "",
        f"`python overhead.py`, {threads} thread(s): seconds to generate with qmc over seconds with iid, in pairs.",
        "",
        "| model | design | rows x tokens | iid, s | ratio, median | 95 % interval |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = np.array(row["times"])
        ratios = times[:, 1] / times[:, 0]
        draws = np.median(rng.choice(ratios, (BOOTSTRAPS, len(ratios))), axis=1)
        low, high = np.percentile(draws, [2.5, 97.5])
        lines.append(
            f"| {row['model']} | {row['design']} | {row['rows']} x {row['tokens']} | {np.median(times[:, 0]):.3f} "
            f"| {np.median(ratios):.3f} | {low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
