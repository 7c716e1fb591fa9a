"""pass@k of coupled samples on warm-started policies: four samplers, the bound, and samples saved at equal pass@k.

    python coverage.py --jobs 2                    both tasks of policies.py, five policies each
    python coverage.py short --seeds 0 --prompts 8 --repeats 1

For every held-out prompt, some groups of each sampler; pass@m by the estimator that the sampler names, for every m that
divides the group. The number of samples that a sampler needs for the pass@k of independent ones is read off its curve,
interpolated in log2 m (monotone cubic). Each seed is a policy with its own warm start; intervals: 95 %, Student's t over
the policies. Writes coverage.json, coverage.md and coverage.png. One thread for each policy; --jobs policies at a time.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
import policies
import torch
from scipy.interpolate import PchipInterpolator

from grpozoo import Request
from grpozoo.compose.command import compose
from grpozoo.compose.plugins import activate
from grpozoo.config import Model
from grpozoo.evaluate import best_of_sets, by_group, pass_at_k
from grpozoo.models.loading import load
from grpozoo.policy.policy import Policy
from grpozoo.rollout import decode
from grpozoo.sampling import Law

sys.path.append(str(Path(__file__).resolve().parents[1]))
from intervals import shown  # noqa: E402

HERE = Path(__file__).resolve().parent
ARMS = {  # sampler -> (overrides, size of a group)
    "iid": (["sampler=iid"], 64),
    "stratified": (["sampler=qmc", "plugins.qmc.eval_design=stratified"], 96),
    "lattice": (["sampler=qmc", "plugins.qmc.eval_design=lattice"], 96),
    "token_sobol": (["sampler=qmc", "plugins.qmc.eval_design=token_sobol"], 64),
}
SIZE = {"short": (128, 4), "long": (64, 2)}  # prompts, groups of each sampler for every prompt
KS = (4, 8, 16, 32)
TARGETS = (8, 16, 32, 64)  # sizes of independent groups whose pass@k is to be reached
DEAD = 8  # size of the groups whose rewards are asked to differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="of short, long; default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the policies")
    parser.add_argument("--prompts", type=int, help="default: 128 of short, 64 of long")
    parser.add_argument("--repeats", type=int, help="groups per prompt and sampler; default: 4 of short, 2 of long")
    parser.add_argument("--max-steps", type=int, help="of the warm starts; default: the recipe's")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    names = args.tasks or list(policies.TASKS)
    if unknown := set(names) - set(policies.TASKS):
        parser.error(f"no task {', '.join(unknown)}; there are {', '.join(policies.TASKS)}")
    jobs = [
        (name, seed, args.prompts or SIZE[name][0], args.repeats or SIZE[name][1], args.max_steps)
        for name in names
        for seed in args.seeds
    ]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        runs = [
            {"task": job[0], "seed": job[1], **found} for job, found in zip(jobs, pool.map(study, jobs), strict=True)
        ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "coverage.json").write_text(json.dumps({"runs": runs}) + "\n")
    (args.out / "coverage.md").write_text(text := report(names, runs))
    print(text)
    plot(names, runs, args.out / "coverage.png")


def study(job: tuple[str, int, int, int, int | None]) -> dict:
    """Of one policy, means over the prompts: pass@m for each m, the share of dead groups, and the bound."""
    name, seed, prompts, repeats, warm_steps = job
    torch.set_num_threads(1)
    task, folder, tokens = policies.policy(name, seed, warm_steps)
    model, tokenizer = load(Model(path=str(folder)), task)
    policy = Policy(model, tokenizer, Law(1.0))
    asked = [task.heldout[i] for i in range(prompts)]
    curves, dead, right = {}, {}, np.zeros(prompts)
    for arm, (overrides, n) in ARMS.items():
        hooks = activate(compose(overrides).plugins).hooks
        requests = [Request(prompt, i, tuple(range(n)), tag="eval") for i, prompt in enumerate(asked)]
        curve: dict[int, list[float]] = {m: [] for m in sizes(arm)}
        same = []
        for repeat in range(repeats):
            sampler = hooks.token_sampler(run=None)
            options = {
                "max_tokens": tokens,
                "max_prompt_length": 99,
                "seed": seed,
                "step": repeat,
                "rows_at_once": 2048,
            }
            rows = decode(requests, sampler, Law(1.0), policy, **options)
            groups = by_group(rows.group_id, map(task.verify, rows.prompts, rows.text))
            design = {key: by_group(rows.group_id, values) for key, values in rows.design.items()}
            for i, group in enumerate(groups):
                own = {key: values[i] for key, values in design.items()}
                for m, found in curve.items():
                    found.append(estimate(sampler, own, group, m))
                wrong = [1 - value for value in group]
                same.append(2 - estimate(sampler, own, group, DEAD) - estimate(sampler, own, wrong, DEAD))
                right[i] += fmean(group) / repeats / len(ARMS)
        curves[arm], dead[arm] = {m: fmean(found) for m, found in curve.items()}, fmean(same)
    bound = {m: float(np.minimum(1, m * right).mean()) for m in range(1, 97)}
    print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    return {
        "prompts": prompts,
        "repeats": repeats,
        "accuracy": right.mean(),
        "bound": bound,
        "curves": curves,
        "dead": dead,
    }


def sizes(arm: str) -> list[int]:
    """The m whose pass@m can be estimated from a group."""
    n = ARMS[arm][1]
    return [m for m in range(1, n + 1) if n % m == 0 and (arm != "token_sobol" or not m & (m - 1))]


def estimate(sampler, design: dict, group: list[float], m: int) -> float:
    """pass@m from one group."""
    if sampler.independent or m == 1:
        return pass_at_k([group], m)
    return best_of_sets([group], [sampler.sets(design, len(group), m)])


def needed(curve: dict[int, float], target: float) -> float:
    """Samples at which the curve m -> pass@m reaches the target; NaN if it does not."""
    m, values = zip(*curve.items(), strict=True)
    if not 0 < target <= values[-1]:
        return float("nan")
    grid = np.linspace(0, np.log2(m[-1]), 2000)
    return float(2 ** grid[np.argmax(PchipInterpolator(np.log2(m), values)(grid) >= target)])


def report(names: list[str], runs: list[dict]) -> str:
    others = [arm for arm in ARMS if arm != "iid"]
    lines = ["# Coverage: pass@k of coupled samples", ""]
    lines += ["`python coverage.py`: mean over the policies ± half the 95 % confidence interval (Student's t).", ""]
    lines += ["Saved: 1 - samples needed for the pass@k of k independent samples / k."]
    for name in names:
        mine = [one for one in runs if one["task"] == name]
        about = f"{len(mine)} policies, {mine[0]['prompts']} prompts, {mine[0]['repeats']} groups of each sampler"
        lines += ["", f"## {name}: accuracy {shown([one['accuracy'] for one in mine])}", "", about + ".", ""]
        lines += [row("pass@k", [*ARMS, "bound"]), row("---", ["---"] * (len(ARMS) + 1))]
        for k in KS:
            cells = [shown([one["curves"][arm][k] for one in mine]) for arm in ARMS]
            lines.append(row(k, [*cells, shown([one["bound"][k] for one in mine])]))
        lines += ["", row("minus iid, k", others), row("---", ["---"] * len(others))]
        for k in KS:
            gains = [[one["curves"][arm][k] - one["curves"]["iid"][k] for one in mine] for arm in others]
            lines.append(row(k, map(shown, gains)))
        lines += ["", row("saved, k", others), row("---", ["---"] * len(others))]
        for k in TARGETS:
            saved = [[1 - needed(one["curves"][arm], one["curves"]["iid"][k]) / k for one in mine] for arm in others]
            lines.append(row(k, map(shown, saved)))
        lines += ["", row("", ARMS), row("---", ["---"] * len(ARMS))]
        cells = [shown([one["dead"][arm] for one in mine]) for arm in ARMS]
        lines.append(row(f"groups of {DEAD} all right or all wrong", cells))
    return "\n".join(lines) + "\n"


def row(head: object, cells) -> str:
    """A line of a table."""
    return f"| {head} | " + " | ".join(cells) + " |"


def plot(names: list[str], runs: list[dict], file: Path) -> None:
    """pass@m against m, mean over the policies, with the bound."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4.5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        mine = [one for one in runs if one["task"] == name]
        curves = {arm: [one["curves"][arm] for one in mine] for arm in ARMS} | {"bound": [one["bound"] for one in mine]}
        for arm, every in curves.items():
            style = {"color": "k", "linestyle": "--"} if arm == "bound" else {"marker": "o", "markersize": 3}
            axis.plot(list(every[0]), [fmean(one[m] for one in every) for m in every[0]], label=arm, **style)
        axis.set(title=name, xlabel="samples m", ylabel="pass@m", xscale="log")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
