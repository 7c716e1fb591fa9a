"""What a batch costs when one layer trains: seconds and memory beside full training, and the theory for the same model.

    python cost.py                          the shape of the tiny policy that is shipped, half a minute
    python cost.py --layers 12              the same with 12 layers, a minute
    python cost.py --model smollm2 --prompts 2 --group 4 --repeats 2    SmolLM2-135M (extra smollm2), some minutes
    python cost.py --model FOLDER           any decoder that transformers loads

A batch is one pass for old log-probabilities, one for the reference and --updates optimizer steps over the same rows.
Each arm is a process of its own with one thread. Writes cost-NAME.json and cost-NAME.md.

Theory (matrix products only; N = B T tokens, no causal skipping, l the trained layer of L):
    F_lin = 2 N (d h (n_q + 2 n_kv) + n_q h d + 3 d d_ff)    F_att = 4 B T^2 n_q h    F_head = 2 N d V
    full       forward  L (F_lin + F_att) + F_head           backward  twice that
    layer      forward  the same                             backward  F_lin + (L - l) (F_lin + 2 F_att) + F_head
    cached     forward  (L - l) (F_lin + F_att) + F_head     backward  the same as layer
The head works on completion tokens alone and computes its logits once more in the backward: both are counted.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

TINY = 4  # layers of the policy that is shipped
HERE = Path(__file__).resolve().parent
ARMS = ("full", "layer, not cached", "layer, cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder")
    parser.add_argument("--layers", type=int, default=TINY, help="of the tiny policy")
    parser.add_argument("--layer", type=int, help="which one trains; default: that of params=single_layer")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--completion-length", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps over the batch")
    parser.add_argument("--repeats", type=int, default=5, help="batches; the first is not counted")
    parser.add_argument("--shared", action="store_true", help="prompts once per group, as training does by default")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args)))
        return
    found = {arm: child(arm) for arm in ARMS}
    name = Path(args.model).name + (f"-{args.layers}" if args.model == "tiny" and args.layers != TINY else "")
    (HERE / f"cost-{name}.json").write_text(json.dumps({"arguments": vars(args), "arms": found}, indent=1) + "\n")
    (HERE / f"cost-{name}.md").write_text(text := table(args, found))
    print(text)


def child(arm: str) -> dict:
    """One arm in a process with one thread, so that its peak memory is its own."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    answer = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--arm", arm], stdout=subprocess.PIPE, text=True, env=environment
    )
    if answer.returncode:
        raise SystemExit(answer.returncode)
    return json.loads(answer.stdout.splitlines()[-1])


def load(args):
    """The policy; what it says does not matter, only its shape."""
    import torch

    from grpozoo import models
    from grpozoo.config import Model
    from grpozoo.policy.policy import Policy
    from grpozoo.sampling import Law

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model == "tiny":
        shape = Model(warm_start=False, layers=args.layers)
    else:
        shape = Model(kind="smollm2") if args.model == "smollm2" else Model(path=args.model)
    model, tokenizer = models.load(shape, None, device)
    return Policy(model, tokenizer, Law(1.0))


def rollouts_of(args, vocabulary: int):
    """Random tokens, all completions of full length."""
    import torch

    from grpozoo.types import Prompt, Rollouts

    torch.manual_seed(0)
    rows, width = args.prompts * args.group, args.completion_length
    prompts = torch.randint(2, vocabulary, (args.prompts, args.prompt_length)).tolist()
    return Rollouts(
        prompts=tuple(Prompt(f"p{row // args.group}", text="") for row in range(rows)),
        group_id=torch.arange(rows) // args.group,
        sample_id=torch.arange(rows) % args.group,
        prompt_ids=tuple(tuple(prompts[row // args.group]) for row in range(rows)),
        completion_ids=torch.randint(2, vocabulary, (rows, width)),
        completion_mask=torch.ones(rows, width, dtype=torch.bool),
        logprobs=torch.zeros(rows, width),
        finish_reason=("length",) * rows,
        text=("",) * rows,
        tag=("train",) * rows,
        policy=("policy",) * rows,
    )


def measure(args) -> dict:
    """Seconds of each batch, peak memory, theory and counted FLOPs of one arm."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from grpozoo.config import Update
    from grpozoo.policy.policy import Snapshot
    from grpozoo.update import cut, pack, tokens_per_micro_batch

    policy = load(args)
    shape = policy.model.config.get_text_config()
    rollouts = rollouts_of(args, shape.vocab_size)
    layer = (shape.num_hidden_layers - 1) // 2 if args.layer is None else args.layer
    full = args.arm == "full"
    policy.model.requires_grad_(full)
    if not full:
        policy.blocks[layer].requires_grad_(True)
    trained = [value for value in policy.model.parameters() if value.requires_grad]
    if args.arm == "layer, cached":
        policy.freeze()
    loaded = memory(policy)
    reference = Snapshot(policy, trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    budget = tokens_per_micro_batch(Update(), policy.model.config)
    rows = list(range(len(rollouts)))

    def passes(who, size):
        for micro in pack(rollouts, rows, size, args.shared):
            yield who.output(cut(rollouts.select(micro)), False, args.shared).logprobs

    # On a CPU the seconds are the processor's: other programs on the machine do not count.
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time

    def batch():
        """Seconds of the whole batch and of its updates alone."""
        start = clock()
        policy.remember(rollouts, 2 * budget, args.shared)
        with torch.no_grad():
            for who in (policy, reference):
                for _ in passes(who, 2 * budget):
                    pass
        wait(policy)
        middle = clock()
        for _ in range(args.updates):
            optimizer.zero_grad()
            for logprobs in passes(policy, budget):
                (-logprobs.mean()).backward()
            optimizer.step()
        policy.remember(None)
        wait(policy)
        return clock() - start, clock() - middle

    with FlopCounterMode(display=False) as count:
        batch()  # not timed: the first one allocates
    seconds, updates = zip(*(batch() for _ in range(args.repeats)), strict=True)
    states = 4 * sum(value.numel() for value in trained)  # float32
    return {
        "layers": shape.num_hidden_layers,
        "layer": layer,
        "parameters": sum(value.numel() for value in policy.model.parameters()),
        "trained": sum(value.numel() for value in trained),
        "seconds": seconds,
        "update_seconds": updates,
        "loaded_mb": loaded,
        "peak_mb": memory(policy, peak=True),
        "owned_mb": 4 * states / 1e6,  # gradient, two moments, the reference's copy
        "flops": count.get_total_flops(),
        "theory": theory(shape, args, layer, 2, args.updates),
        "theory_update": theory(shape, args, layer, 0, 1),
    }


def wait(policy) -> None:
    """Until the device has done what it was told."""
    import torch

    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def memory(policy, peak: bool = False) -> float:
    """MB in use now, from when on the peak is measured anew; or that peak. Of the GPU, or of the process."""
    import torch

    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
        if not peak:
            torch.cuda.reset_peak_memory_stats()
        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 1e6
    status = Path("/proc/self/status")
    if status.exists():
        if not peak:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is in use now
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def theory(shape, args, layer: int, passes: int, updates: int) -> float:
    """FLOPs of some passes without gradient and some updates. Prompts count once per completion (without --shared)."""
    B, T = args.prompts * args.group, args.prompt_length + args.completion_length - 1
    N, L, d = B * T, shape.num_hidden_layers, shape.hidden_size
    n_q, n_kv = shape.num_attention_heads, shape.num_key_value_heads
    h = getattr(shape, "head_dim", None) or d // n_q
    lin = 2 * N * (d * h * (n_q + 2 * n_kv) + n_q * h * d + 3 * d * shape.intermediate_size)
    att, head = 4 * B * T * T * n_q * h, 2 * B * args.completion_length * d * shape.vocab_size
    forward = L * (lin + att) + head
    if args.arm == "full":
        return (passes + updates) * forward + updates * (2 * L * (lin + att) + 3 * head)
    backward = lin + (L - layer) * (lin + 2 * att) + 2 * head
    if args.arm == "layer, not cached":
        return (passes + updates) * forward + updates * backward
    fill = layer * (lin + att) if passes else 0  # the first pass makes the states that the others read
    return fill + (passes + updates) * ((L - layer) * (lin + att) + head) + updates * backward


def table(args, found: dict) -> str:
    """The arms beside each other, as Markdown."""
    full, one = found["full"], found["layer, cached"]
    lines = [
        f"# Cost of training layer {one['layer']} of {one['layers']} of {Path(args.model).name}",
        "",
        f"{args.prompts} prompts x {args.group} completions, {args.prompt_length} + {args.completion_length} tokens, float32; one pass "
        f"for old log-probabilities, one for the reference, {args.updates} updates; prompts "
        f"{'once per group' if args.shared else 'once per completion'}. Median of {args.repeats} batches.",
        f"{full['parameters'] / 1e6:.2f}M parameters, {one['trained'] / 1e6:.2f}M in the layer "
        f"({one['trained'] / full['parameters']:.1%}).",
        "",
        "| trains | updates, s | of full | theory | whole batch, s | of full | theory | FLOPs counted | peak above the loaded "
        "model, MB | gradient, moments, reference, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, row in found.items():
        cells = [arm]
        for seconds, flops in (("update_seconds", "theory_update"), ("seconds", "theory")):
            now, before = median(row[seconds]), median(full[seconds])
            cells += [f"{now:.3f}", f"{now / before:.2f}", f"{row[flops] / full[flops]:.2f}"]
        cells += [
            f"{row['flops'] / full['flops']:.2f}",
            f"{row['peak_mb'] - row['loaded_mb']:.0f}",
            f"{row['owned_mb']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Theory and count are FLOPs over those of full. Counted: by torch's FlopCounterMode over the whole batch; it leaves",
              "fused attention out on a CPU."]  # fmt: skip
    if args.shared:
        lines += ["", "The theory counts prompts once per completion, which these runs did not compute."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
