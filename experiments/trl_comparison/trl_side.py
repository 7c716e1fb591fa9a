"""TRL's GRPOTrainer on a list of prompts: seconds per step, generation speed, peak memory, as one JSON file.

Run by compare.py as a process of its own. TRL gets its best setting for a CPU: the whole batch in one forward (unless
--micro-batch says otherwise), float32, no gradient checkpointing, nothing logged, saved, reported or evaluated.
Generation is timed twice: inside `model.generate` alone (the figure that flatters TRL, and the one compared), and
inside the trainer's `_generate`, which also tokenises the prompts and decodes the completions.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from zlib import crc32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder with safetensors and tokenizer")
    parser.add_argument("--prompts", required=True, help="JSONL: prompt (text or messages) and answer, in order of use")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=10, help="the first one is warm-up and not counted")
    parser.add_argument("--groups", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--completion", type=int, default=24, help="longest completion, tokens")
    parser.add_argument("--micro-batch", type=int, default=0, help="completions per forward of the update; 0: all")
    parser.add_argument("--reward", choices=["right", "dense"], default="right")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def text(completion) -> str:
    """What the policy wrote; TRL hands chat completions over as messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(prompts, completions, answer, **_) -> list[float]:
    """1 for the exact answer, by the functions with which grpozoo's own task verifies."""
    from grpozoo.tasks.arithmetic import final_answer, last_integer

    chat = not isinstance(prompts[0], str)
    found = [last_integer(text(c).rpartition("#")[2]) if chat else final_answer(c) for c in completions]
    return [float(f == a) for f, a in zip(found, answer, strict=True)]


def dense(completions, **_) -> list[float]:
    """A number that any change of the text changes: only copies tie, nearly every row trains. Serves grpozoo, too."""
    return [crc32(text(completion).encode()) / 2**32 for completion in completions]


def config(folder: str, args: argparse.Namespace, **more):
    """GRPO as published (one update per batch, group std, sequence mean, no KL), and nothing that costs time."""
    from trl import GRPOConfig

    rows = args.groups * args.samples
    micro = args.micro_batch or rows
    options = dict(
        output_dir=folder, max_steps=args.steps, seed=args.seed, learning_rate=args.lr, lr_scheduler_type="constant",
        per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro, num_generations=args.samples,
        max_completion_length=args.completion, temperature=1.0, beta=0.0, loss_type="grpo", weight_decay=0.0,
        max_grad_norm=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False, shuffle_dataset=False,
        report_to="none", logging_strategy="no", save_strategy="no", eval_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    return GRPOConfig(**{**options, **more})


def trainer(config, args: argparse.Namespace, callbacks=(), **more):
    """A GRPOTrainer on the prompts in the order of the file."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    return GRPOTrainer(
        model=args.model, reward_funcs=globals()[args.reward], args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=list(callbacks), **more,
    )  # fmt: skip


def timed(function, log: list[float]):
    """`function`, that appends the seconds of every call to `log`."""

    def call(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        log.append(time.perf_counter() - start)
        return result

    return call


def measure(args: argparse.Namespace) -> dict:
    """Train, and return what was measured; every list has one number per step."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(args.threads)
    ends, generate, rollout, tokens, rewards = [], [], [], [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        run = trainer(config(folder, args), args, [Clock()])
        run.model.generate = timed(run.model.generate, generate)
        inner, reward = timed(run._generate, rollout), run._calculate_rewards

        def counted(prompts):
            result = inner(prompts)
            tokens.append(sum(map(len, result[1])))
            return result

        def averaged(*inputs):
            result = reward(*inputs)
            rewards.append(result.mean().item())
            return result

        run._generate, run._calculate_rewards = counted, averaged
        run.train()
    step = [after - before for before, after in zip(ends, ends[1:], strict=False)]  # without the first
    return {
        "side": "trl",
        "step_s": step,
        "generate_s": generate,
        "rollout_s": rollout,
        "completion_tokens": tokens,
        "reward": rewards,
        "seconds_per_step": statistics.median(step),
        "tokens_per_second": sum(tokens[1:]) / sum(generate[1:]),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,  # Linux counts KiB
    }


if __name__ == "__main__":
    options = arguments()
    result = measure(options)
    Path(options.out).write_text(json.dumps(result, indent=1))
    print({name: result[name] for name in ("seconds_per_step", "tokens_per_second", "peak_mb")})
