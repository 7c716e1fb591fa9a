"""The core's own part of the configuration: every key with its type, unit and range. Plugins own theirs."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from grpozoo.errors import UserError

Schedule = Enum("Schedule", ["constant", "linear", "cosine"])

TINY = ("warm_start", "layers", "width", "heads")  # keys of `model` that only the tiny policy reads

HOTTEST = 1e5  # highest temperature: logits of size 10 no longer differ in float32
MOST = 10**6  # completions of one batch, or of one prompt in evaluation: all are in memory
COLDEST = 1e-5  # lowest positive temperature: logits of size 10 are rounded by 1e-6


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def check_temperature(name: str, value: float) -> None:
    """0 (greedy), or hot enough that not the rounding of float32 logits chooses the token."""
    require(
        value == 0 or COLDEST <= value < float("inf"),
        f"{name} is at least {COLDEST:g}, or 0 where greedy is allowed: below, rounding errors of float32 logits choose, got {value}",
    )
    require(value <= HOTTEST, f"{name} is at most {HOTTEST:g}: above, every token is equally likely, got {value}")


@dataclass
class Sampling:
    """Truncation of the sampling law; the trainer's log-probabilities follow it."""

    top_k: int = 0  # tokens kept; 0 = all
    top_p: float = 1.0  # probability mass kept, (0, 1]
    min_p: float = 0.0  # kept if at least this share of the likeliest token's probability, [0, 1)

    def check(self) -> None:
        require(self.top_k >= 0, f"sampling.top_k is at least 0 (0 keeps all tokens), got {self.top_k}")
        require(0 < self.top_p <= 1, f"sampling.top_p lies in (0, 1], got {self.top_p}")
        require(0 <= self.min_p < 1, f"sampling.min_p lies in [0, 1), got {self.min_p}")


@dataclass
class Update:
    """How a batch of rollouts becomes optimizer steps. Nothing here but epochs and mini_batches changes the mathematics."""

    mini_batches: int = 1  # optimizer steps that share one batch of rollouts
    epochs: int = 1  # passes over the batch
    tokens_per_micro_batch: int | None = None  # padded tokens per forward; null: from activation_memory_mb
    activation_memory_mb: int = 1024  # MiB of estimated activations that a micro-batch may take
    logits_chunk: int = 512  # completion tokens whose logits exist at the same time
    shared_prefix: bool = True  # forward and backward of a prompt once per group; false: once per completion
    prefix_cache: bool = True  # keep the states of frozen first layers for all passes over a batch; false: less memory
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time; excludes shared_prefix

    @property
    def per_batch(self) -> int:
        """Optimizer steps that share one batch of rollouts."""
        return self.mini_batches * self.epochs

    def check(self) -> None:
        for name in ("mini_batches", "epochs", "activation_memory_mb", "logits_chunk"):
            require(getattr(self, name) >= 1, f"update.{name} is at least 1, got {getattr(self, name)}")
        tokens = self.tokens_per_micro_batch
        require(tokens is None or tokens >= 1, f"update.tokens_per_micro_batch is at least 1 or null, got {tokens}")


@dataclass
class Optim:
    """AdamW and its schedule."""

    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999]
    )  # decay of the running means of gradient and square
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.0  # decoupled, times the learning rate
    max_grad_norm: float = 1.0  # 2-norm over all trained parameters; 0 = no clipping
    schedule: Schedule = Schedule.constant  # after the warm-up, down to zero after the last update
    warmup_steps: int = 0  # optimizer steps of linear warm-up

    def check(self) -> None:
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optim.betas are two numbers in [0, 1), got {self.betas}",
        )
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            require(getattr(self, name) >= 0, f"optim.{name} is at least 0, got {getattr(self, name)}")
        require(0 < self.eps <= 1, f"optim.eps lies in (0, 1]: a larger one leaves no update, got {self.eps}")


@dataclass
class Eval:
    """Held-out evaluation: greedy and sampled."""

    every: int = 20  # steps; 0 = only at the start and the end
    prompts: int = 256  # held-out prompts, the first ones; 0 = all
    samples: int = 8  # sampled completions per prompt for avg@k, pass@k, best@k, maj@k; 0 = greedy only
    ks: list[int] = field(default_factory=lambda: [1, 4, 8])  # each at most `samples`
    correct: str | None = None  # reward that tells right (>= 1); null: a built-in task's verifier, or else the first
    temperature: float = 1.0  # of the sampled completions

    def check(self) -> None:
        for name in ("every", "prompts", "samples"):
            require(getattr(self, name) >= 0, f"eval.{name} is at least 0, got {getattr(self, name)}")
        require(
            self.temperature > 0, f"eval.temperature is positive (greedy is always reported), got {self.temperature}"
        )
        check_temperature("eval.temperature", self.temperature)
        require(self.samples <= MOST, f"eval.samples is at most {MOST}, got {self.samples}")
        bad = [k for k in self.ks if not 1 <= k <= max(self.samples, 1)] if self.samples else []
        require(not bad, f"eval.ks lie in 1..eval.samples = {self.samples}, got {bad}")


@dataclass
class Checkpoint:
    """When a run saves what it needs to go on."""

    every: int = 20  # steps; 0 = only at the end and when interrupted
    keep: int = 2  # newest checkpoints kept, besides the one of the best held-out accuracy

    def check(self) -> None:
        require(self.every >= 0, f"checkpoint.every is at least 0, got {self.every}")
        require(self.keep >= 1, f"checkpoint.keep is at least 1, got {self.keep}")


@dataclass
class Logger:
    """Where numbers go besides metrics.jsonl."""

    trackers: list[str] = field(
        default_factory=lambda: ["tensorboard"]
    )  # accelerate's: tensorboard, wandb, mlflow, ...
    project: str = "grpozoo"  # project name in trackers that have one
    completions: int = 16  # completions written to completions.jsonl in each step; -1 = all
    progress: bool = True  # live line and final table

    def check(self) -> None:
        folder = self.project in ("", ".", "..") or any(sign in self.project for sign in "/\\\0")
        require(
            not folder,
            f"logger.project is a name without / and \\ (trackers make a folder of it), got {self.project!r}",
        )
        require(self.completions >= -1, f"logger.completions is at least -1 (all), got {self.completions}")


@dataclass
class Model:
    """Which policy is trained."""

    kind: str = "tiny"  # ignored where path is set
    path: str | None = None  # a folder or hub name that transformers loads; overrides kind
    dtype: str = "float32"  # float32 | bfloat16
    attention: str = "sdpa"  # transformers' attn_implementation
    trust_remote_code: bool = False  # run Python code that comes with the model
    allow_pickle: bool = False  # load weights that are not safetensors
    chat_template: bool | None = None  # null: for chat messages; true: for plain text too; false: never
    special_tokens_in_data: bool = False  # those that stand in the data become control ids; false: they are text
    warm_start: bool = True  # tiny only: start from supervised weights; false: random ones
    layers: int = 4  # tiny only: decoder layers
    width: int = 128  # tiny only: size of hidden states, an even multiple of heads
    heads: int = 4  # tiny only: attention heads

    def check(self) -> None:
        require(
            self.path is not None or self.kind in ("tiny", "smollm2"),
            f"model.kind is tiny or smollm2 (or set model.path), got {self.kind!r}",
        )
        require(
            self.dtype != "float16",
            "model.dtype=float16 cannot be trained: Adam's squared gradients are zero in it; use bfloat16 or float32",
        )
        require(self.dtype in ("float32", "bfloat16"), f"model.dtype is float32 or bfloat16, got {self.dtype!r}")
        if self.path is not None or self.kind != "tiny":
            changed = [name for name in TINY if getattr(self, name) != Model.__dataclass_fields__[name].default]
            require(not changed, f"model.{'/'.join(changed)} shapes model=tiny only; this model brings its own")
        for name in ("layers", "width", "heads"):
            require(getattr(self, name) >= 1, f"model.{name} is at least 1, got {getattr(self, name)}")
        require(
            self.width % self.heads == 0, f"model.width {self.width} must be a multiple of model.heads {self.heads}"
        )
        size = self.width // self.heads
        require(size % 2 == 0, f"the head size model.width / model.heads is {size} and must be even (rotary positions)")


@dataclass
class Config:
    """Everything but the plugins' options and the task's."""

    seed: int = 0  # of every random stream
    steps: int = 100  # batches of rollouts
    prompts_per_step: int = 16  # of all processes together
    group_size: int = 8  # completions per prompt
    max_completion_length: int = 64  # tokens, stop token included
    temperature: float = 1.0  # of the training rollouts
    lr: float = 1e-4  # AdamW learning rate
    resume: str | None = None  # auto | run folder | checkpoint folder
    resume_changed: bool = False  # resume although code, reference or tokenizer are not those of the start
    run_dir: str | None = None  # null: a new folder under runs/
    max_prompt_length: int = 1024  # tokens; a longer prompt is an error
    reward_timeout: float = 120.0  # seconds that a reward plugin may take for one batch
    sampling: Sampling = field(default_factory=Sampling)
    update: Update = field(default_factory=Update)
    optim: Optim = field(default_factory=Optim)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logger: Logger = field(default_factory=Logger)
    model: Model = field(default_factory=Model)
    task: dict[str, Any] = MISSING  # task.kind and the options of its Config
    plugins: dict[str, Any] = MISSING  # NAME: options
    order: list[str] | None = None  # plugins in the order in which they apply; null: each plugin's own place

    def check(self) -> None:
        """Ranges and contradictions, before a model is loaded."""
        for name in ("steps", "prompts_per_step", "group_size", "max_completion_length", "max_prompt_length"):
            require(getattr(self, name) >= 1, f"{name} is at least 1, got {getattr(self, name)}")
        require(self.reward_timeout > 0, f"reward_timeout is positive, got {self.reward_timeout}")
        require(self.lr >= 0, f"lr is at least 0, got {self.lr}")
        check_temperature("temperature", self.temperature)
        require(
            self.temperature > 0 or self.group_size == 1,
            "temperature=0 is greedy: every sibling of a group would be the same; use a positive temperature or group_size=1",
        )
        rows = self.prompts_per_step * self.group_size
        require(rows <= MOST, f"prompts_per_step * group_size is at most {MOST} completions, got {rows}")
        require(
            self.update.mini_batches <= rows,
            f"update.mini_batches={self.update.mini_batches} optimizer steps cannot share {rows} completions (prompts_per_step * group_size)",
        )
        for section in (self.sampling, self.update, self.optim, self.eval, self.checkpoint, self.logger, self.model):
            section.check()
