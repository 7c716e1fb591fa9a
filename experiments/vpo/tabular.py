"""VPO and its controls without a network: what the set reward alone makes of a policy that is a table of logits.

    python tabular.py                            both problems, all seeds; one thread, about three minutes
    python tabular.py --seeds 2 --steps 100      a look

Three answers: (1,0), (0,1) and (.6,.6); a completion has three slots, each a softmax over them; G = 8, K = 100, learning
rate .2, 400 steps. Deceptive blocks: an answer is four blocks of three bits, a block is worth 1 if all are on and else
.4 (2 - u) for u bits that are on; four slots of independent bits, G = 32, K = 64, rate .3, 500 steps. One REINFORCE step
for each group, with the advantages that the plugins compute. The components of an answer are its vector or its blocks.

Slots: what each ends with. E_w best: the expected best answer under uniform weights; diversity: mean L1 distance of two
answers of a completion; both of 256 completions of the last policy. Solved: seeds with a slot that ends all on.
Writes tabular.json (every seed) and tabular.md (means with 95 % confidence intervals over the seeds, Student's t).
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from grpozoo.testing import Context, assemble, compose

sys.path.append(str(Path(__file__).resolve().parents[1]))
from intervals import shown  # noqa: E402

HERE = Path(__file__).resolve().parent
ARMS = {
    "VPO": ["algo=vpo"],
    "Multi-RLVR max": ["algo=multi_rlvr"],
    "Multi-RLVR sum": ["algo=multi_rlvr", "plugins.multi_rlvr.reduce=sum"],
}
ANSWERS = np.array([[1, 0], [0, 1], [0.6, 0.6]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="of each problem; null: 10 and 8")
    parser.add_argument("--steps", type=int, help="null: 400 and 500")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    args = parser.parse_args()
    problems = {"three answers": (three_answers, 10, 400), "deceptive blocks": (deceptive_blocks, 8, 500)}
    runs = [
        {"problem": problem, "arm": arm, "seed": seed, **learn(options, seed, args.steps or steps)}
        for problem, (learn, seeds, steps) in problems.items()
        for arm, options in ARMS.items()
        for seed in range(args.seeds or seeds)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tabular.json").write_text(json.dumps(runs, indent=1) + "\n")
    (args.out / "tabular.md").write_text(text := table(runs))
    print(text)


def three_answers(options: list[str], seed: int, steps: int) -> dict:
    """Slots of softmaxes over the three answers."""
    method, rng, logits = Method(options, seed), np.random.default_rng(seed), np.zeros((3, 3))
    for step in range(steps):
        chosen = sample(logits, 8, rng)
        A = method.advantages(ANSWERS[chosen], step)
        logits += 0.2 * np.einsum("n,nsc->sc", A, np.eye(3)[chosen] - softmax(logits)) / len(A)
    slots = sorted(logits.argmax(1).tolist())
    return {"slots": slots, **worth(ANSWERS[sample(logits, 256, rng)])}


def deceptive_blocks(options: list[str], seed: int, steps: int) -> dict:
    """Slots of twelve independent bits."""
    draws = ["plugins.vpo.draws=64"] * ("algo=vpo" in options)
    method, rng, logits = Method([*options, *draws], seed), np.random.default_rng(seed), np.zeros((4, 12))
    for step in range(steps):
        p = 1 / (1 + np.exp(-logits))
        bits = (rng.random((32, *p.shape)) < p).astype(float)
        A = method.advantages(blocks(bits), step)
        logits += 0.3 * np.einsum("n,nsb->sb", A, bits - p) / len(A)
    p = 1 / (1 + np.exp(-logits))
    final = blocks((logits > 0).astype(float)).mean(1)
    sampled = blocks((rng.random((256, *p.shape)) < p).astype(float))
    return {"slots": sorted(final.round(3).tolist()), "solved": bool(final.max() == 1), **worth(sampled)}


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def sample(logits: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """[n, slots] choices."""
    return (logits + rng.gumbel(size=(n, *logits.shape))).argmax(-1)


def blocks(bits: np.ndarray) -> np.ndarray:
    """[..., 12] bits -> [..., 4] components."""
    on = bits.reshape(*bits.shape[:-1], 4, 3).sum(-1)
    return np.where(on == 3, 1.0, 0.4 * (2 - on))


def worth(answers: np.ndarray) -> dict[str, float]:
    """Of completions [n, m, d]: the expected best answer under uniform weights, and the distance of two answers."""
    W = np.random.default_rng(0).dirichlet(np.ones(answers.shape[-1]), 4096)
    distances = np.abs(answers[:, :, None] - answers[:, None]).sum(-1)  # [n, m, m]
    m = answers.shape[1]
    return {
        "best": float((answers @ W.T).max(1).mean()),
        "uniform": float(answers.mean(-1).max(1).mean()),
        "diversity": float(distances.sum((1, 2)).mean() / (m * (m - 1))),
    }


class Method:
    """The advantages that a composition gives a group of answer sets."""

    def __init__(self, options: list[str], seed: int):
        self.run = Context(*compose(*options, f"seed={seed}", "plugins.grpo.ddof=0", "plugins.grpo.eps=1e-6"))

    def advantages(self, answers: np.ndarray, step: int) -> np.ndarray:
        """[G, m, d] -> [G]."""
        self.run.step, size = step, len(answers)
        flat = torch.zeros(size, 1, dtype=torch.float64)
        tables = {name: flat for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy")}
        group = assemble([1] * size, [0] * size, [0.0] * size, tables, flat)
        rewards = replace(group.rewards, vectors={"answers": tuple(torch.tensor(answers, dtype=torch.float64))})
        rewards = self.run.hooks.transform_rewards(rollouts=group.rollouts, rewards=rewards, run=self.run)
        return self.run.hooks.advantage(rollouts=group.rollouts, rewards=rewards, run=self.run).double().numpy()


def table(runs: list[dict]) -> str:
    """One table for each problem, one line for each arm."""
    lines = [
        "# VPO without a network",
        "",
        "`python tabular.py`; mean ± half the 95 % confidence interval over the seeds (Student's t).",
    ]
    for problem in dict.fromkeys(run["problem"] for run in runs):
        some = [run for run in runs if run["problem"] == problem]
        solved = "solved" in some[0]
        lines += [
            "",
            f"## {problem}",
            "",
            "| arm | seeds | "
            + ("solved" if solved else "slots of how many seeds")
            + " | E_w best | best of m, uniform w | diversity |",
        ]
        lines += ["|" + " --- |" * 6]
        for arm in dict.fromkeys(run["arm"] for run in some):
            own = [run for run in some if run["arm"] == arm]
            ends = Counter(" ".join(map(str, run["slots"])) for run in own)
            end = (
                sum(run["solved"] for run in own)
                if solved
                else ", ".join(f"{{{end}}} {n}" for end, n in ends.most_common())
            )
            cells = [shown([run[name] for run in own]) for name in ("best", "uniform", "diversity")]
            lines.append(f"| {arm} | {len(own)} | {end} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
