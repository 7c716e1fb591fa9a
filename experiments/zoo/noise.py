"""Noise between sampler and trainer: how much of it reaches the gradient of a completion, with token and sequence ratios.

    python noise.py        writes noise.md; seconds

The old log-probability of every token is off by N(0, sigma), A = 1, nothing is clipped. Printed is the standard
deviation of the weight that a token's gradient gets, relative to its value without noise, over 512 completions.
"""

from pathlib import Path

import torch

from grpozoo.cli.card import table
from grpozoo.testing import assemble, loss

ROWS, SIGMA = 512, 0.05
ARMS = {
    "GRPO": ["plugins.grpo.clip=1", "plugins.grpo.clip_high=1e9"],
    "GSPO": ["algo=gspo", "plugins.gspo.clip=1", "plugins.gspo.clip_high=1e9"],
    "GMPO": ["algo=gmpo", "plugins.gmpo.clip=1e9"],
}


def spread(overrides: list[str], noise: torch.Tensor) -> float:
    """noise: [rows, T], nats."""
    rows, length = noise.shape
    logprobs = torch.full_like(noise, -1.0)
    fields = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")
    step = assemble([length] * rows, [0] * rows, [0.0] * rows, dict.fromkeys(fields, logprobs), logprobs + noise)
    gradient = loss(*overrides, step=step, advantages=[1.0] * rows)[1]
    return (gradient * -rows * length).std().item()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for length in (16, 64, 256, 1024):
        noise = SIGMA * torch.randn(ROWS, length, generator=generator, dtype=torch.float64)
        found = [spread(overrides, noise) for overrides in ARMS.values()]
        lines.append([length, *(f"{value:.4f}" for value in found), f"{SIGMA / length**0.5:.4f}"])
    text = f"# Noise of sigma = {SIGMA} nats per token\n\n`python noise.py`: spread of a token's weight, {ROWS} completions.\n\n"
    text += table(["tokens", *ARMS, "sigma / sqrt(tokens)"], lines)
    (Path(__file__).resolve().parent / "noise.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
