"""Three faults measured in TRL 1.16.0, and the same three questions put to grpozoo: largest difference of a weight.

    python faults.py --model FOLDER --prompts prompts.jsonl        (both as `zoo_side.py --prompts` writes them)

    F1  the run with an evaluation every 2 steps, against the run without
    E2  the run stopped inside a generation cycle (4 optimizer steps share a batch of completions) and resumed, against
        the uninterrupted one
    A1  one optimizer step with the batch in 8 (TRL) or many (grpozoo) micro-batches, against one. AdamW with eps = 1,
        lr = 1 moves a weight by nearly its gradient, where the usual eps would blow rounding up to a full step

A zero means: equal to the last bit. Beside each difference stands the largest change of a weight over the whole run,
which says what the difference is to be compared with. TRL runs in this process through its Python interface, grpozoo
through its command line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import torch
import trl_side
import zoo_side
from datasets import Dataset
from safetensors.torch import load_file

GROUPS, SAMPLES, CYCLE = 8, 8, 4  # prompts, completions per prompt, optimizer steps per generation cycle
LOSSES = {  # TRL's loss_type, grpozoo's aggregation
    "sequence mean": ("grpo", "seq_mean"),
    "token mean": ("dapo", "token_mean"),
    "token mean of bnpo": ("bnpo", "token_mean"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("faults.json"))
    parser.add_argument("--sides", nargs="+", default=["trl", "grpozoo"], choices=["trl", "grpozoo"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.model = str(Path(args.model).resolve())  # grpozoo runs elsewhere, so that its folders do not stay here
    start = load_file(Path(args.model, "model.safetensors"))
    found = {}
    for side in args.sides:
        with tempfile.TemporaryDirectory() as folder:
            probe = {"trl": trl_faults, "grpozoo": zoo_faults}[side](args, Path(folder))
            for name, one, other in probe:
                found.setdefault(name, {})[side] = {"difference": distance(one, other), "moved": distance(start, one)}
                print(name, side, found[name][side], file=sys.stderr, flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(found, args.sides))
    print(table(found, args.sides))


def distance(one: dict, other: dict) -> float:
    """Largest absolute difference of a weight."""
    return max(float((one[name] - other[name]).abs().max()) for name in one.keys() & other.keys())


# ------------------------------------------------------------------------------------------------------------- TRL


def trl_faults(args, folder: Path):
    """(name, weights, weights that should be the same)"""
    straight = trl_run(args, folder / "straight", steps=6)
    yield "control: the same run twice", straight, trl_run(args, folder / "again", steps=6)
    evaluated = trl_run(args, folder / "evaluated", steps=6, eval_strategy="steps", eval_steps=2)
    yield "F1: evaluation on or off", straight, evaluated
    cycle = {"steps": 2 * CYCLE, "micro": GROUPS * SAMPLES // CYCLE, "accumulate": 1, "steps_per_generation": CYCLE}
    saved = trl_run(args, folder / "saved", **cycle, save_strategy="steps", save_steps=2)
    for name, step in (("control: resumed at the end of a cycle", CYCLE), ("E2: resumed inside a cycle", CYCLE + 2)):
        yield name, saved, trl_run(args, folder / name[:2], **cycle, resume=folder / f"saved/checkpoint-{step}")
    for name, (loss, _) in LOSSES.items():
        gradient = {"steps": 1, "learning_rate": 1.0, "adam_epsilon": 1.0, "loss_type": loss}
        whole = trl_run(args, folder / "whole", **gradient)
        parts = trl_run(args, folder / "parts", **gradient, micro=GROUPS * SAMPLES // 8, accumulate=8)
        yield f"A1: micro-batches, {name}", whole, parts


def trl_run(args, folder: Path, steps: int, micro: int = 0, accumulate: int = 1, resume: Path | None = None, **options):
    """Weights after a run of TRL."""
    sizes = SimpleNamespace(model=args.model, prompts=args.prompts, steps=steps, groups=GROUPS, samples=SAMPLES)
    sizes.completion, sizes.micro_batch, sizes.lr, sizes.seed, sizes.reward = 24, micro, 3e-4, 0, "right"
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    options = {"gradient_accumulation_steps": accumulate, "per_device_eval_batch_size": SAMPLES, **options}
    with redirect_stdout(sys.stderr):
        config = trl_side.config(str(folder), sizes, **options)
        run = trl_side.trainer(config, sizes, eval_dataset=Dataset.from_list(rows[-4:]))
        run.train(resume_from_checkpoint=str(resume) if resume else None)
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


# --------------------------------------------------------------------------------------------------------- grpozoo


def zoo_faults(args, folder: Path):
    """(name, weights, weights that should be the same)"""
    straight = zoo_run(args, folder / "straight", 6)
    yield "control: the same run twice", straight, zoo_run(args, folder / "again", 6)
    evaluated = zoo_run(args, folder / "evaluated", 6, "eval.every=2", "eval.samples=4", "eval.ks=[1]")
    yield "F1: evaluation on or off", straight, evaluated
    cycle = (4, f"update.mini_batches={CYCLE}")
    saved = zoo_run(args, folder / "saved", *cycle, "checkpoint.every=2", "checkpoint.keep=9")
    end = folder / "saved/checkpoints/step-00000002"
    yield "control: resumed at the end of a cycle", saved, zoo_run(args, folder / "saved", *cycle, f"resume={end}")
    inside = zoo_stopped(args, folder, *cycle)
    yield "E2: resumed inside a cycle", saved, zoo_run(args, inside, *cycle, f"resume={inside}")
    for name, (_, how) in LOSSES.items():
        gradient = (1, "lr=1", "optim.eps=1", f"plugins.grpo.aggregation={how}")
        whole = zoo_run(args, folder / f"whole {name}", *gradient, "update.tokens_per_micro_batch=1000000")
        parts = zoo_run(args, folder / f"parts {name}", *gradient, "update.tokens_per_micro_batch=64")
        yield f"A1: micro-batches, {name}", whole, parts


def zoo_command(args, folder: Path, steps: int, *overrides: str) -> list[str]:
    sizes = SimpleNamespace(model=args.model, steps=steps, groups=GROUPS, samples=SAMPLES, completion=24, lr=3e-4)
    sizes.seed, sizes.overrides = 0, list(overrides)
    keys = {override.partition("=")[0] for override in overrides}
    return [part for part in zoo_side.command(sizes, folder) if part.partition("=")[0] not in keys or part in overrides]


def zoo_run(args, folder: Path, steps: int, *overrides: str) -> dict:
    """Weights after a run of grpozoo."""
    command = zoo_command(args, folder, steps, *overrides)
    subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder.parent, check=True, stdout=sys.stderr
    )
    return load_file(folder / "model/model.safetensors")


def zoo_stopped(args, folder: Path, steps: int, *overrides: str) -> Path:
    """The folder of a run that SIGTERM stopped between two optimizer steps of one cycle; tried until it is hit."""
    for attempt in range(20):
        target = folder / f"stopped {attempt}"
        command = zoo_command(args, target, steps, *overrides)
        child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder, stdout=sys.stderr)
        metrics = target / "metrics.jsonl"
        while child.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            time.sleep(0.005)  # the line of step 0 is the evaluation, that of step 2 ends the second cycle
        last = json.loads(metrics.read_text().splitlines()[2])
        time.sleep(last["time/generate_s"] + last["time/update_s"] * (0.5, 0.2, 0.8)[attempt % 3])
        child.send_signal(signal.SIGTERM)
        child.wait()
        newest = max(target.glob("checkpoints/step-*"), default=None)
        state = torch.load(newest / "trainer.pt", weights_only=True) if newest else {"cycle": None}
        if state["cycle"] and 0 < state["cycle"]["done"] < CYCLE:
            done = state["cycle"]["done"]
            print(f"stopped after step {state['step']} and {done} of {CYCLE} updates", file=sys.stderr)
            return target
    sys.exit("no signal arrived inside a cycle: make the updates longer, for example with GROUPS = 32")


def table(found: dict, sides: list[str]) -> str:
    """The largest differences as Markdown, the largest change of a weight in brackets."""
    lines = ["| largest difference of a weight (largest change in the run) | " + " | ".join(sides) + " |"]
    lines.append("|---" * (1 + len(sides)) + "|")
    for name, values in found.items():
        cells = [f"{values[side]['difference']:.2g} ({values[side]['moved']:.2g})" for side in sides]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
