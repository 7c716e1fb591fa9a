"""Trains several compositions in this process, or in each of several. See test_shards.py."""

from pathlib import Path
from unittest import mock

from grpozoo.cli.train import train
from grpozoo.compose.command import compose

COMMON = [
    "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "max_completion_length=8", "steps=2",
    "task.level=1", "task.train=400", "task.heldout=40", "prompts_per_step=3", "group_size=4", "update.mini_batches=2", "lr=1e-3", "eval.every=0",
    "eval.prompts=2", "eval.samples=0", "logger.trackers=[]", "logger.progress=false", "checkpoint.every=0",
    "reward=function", f"plugins.function.path={Path(__file__).parent / 'digits.py'}:digits",
]  # fmt: skip
ON = ["plugins.stare.target_entropy=99", "plugins.stare.reweight_w=3"]
CASES = {  # every method that looks at a group, a batch, an optimizer step or the run
    "adaptive_entropy": ["plugins.adaptive_entropy.init=0.1", "plugins.adaptive_entropy.coef_max=1", "plugins.adaptive_entropy.target=99"],
    "bnpo": [],
    "clip_cov": ["plugins.clip_cov.share=0.3", "plugins.clip_cov.lower=-99", "plugins.clip_cov.upper=99"],
    "dapo": [],
    "entropy_mask": [],
    "gdpo": [],
    "kl_cov": ["plugins.kl_cov.share=0.2"],
    "luffy": [],
    "[mismatch,reinforce_pp]": ["plugins.mismatch.level=token", "plugins.mismatch.mode=truncate", "plugins.mismatch.normalize=true"],
    "[process,kl]": ["+plugins.steps={}", "+plugins.answer={}", "plugins.kl.coef=0.1"],
    "reinforce_pp_baseline": [],
    "remax": [],
    "stare": [*ON, "plugins.stare.w_star_every=1", "plugins.stare.adaptive=true", "plugins.stare.w_max=9"],
    "[gspo,stare]": [*ON, "plugins.stare.variant=C2"],
    "steer": [],
    "token_class": ["plugins.token_class.pattern='[0-9a-z]'"],
}  # fmt: skip


def main(folder: Path) -> None:
    with mock.patch("torch.distributed.destroy_process_group"):  # the group serves all trainings
        for name, options in CASES.items():
            place = folder / name.strip("[]").replace(",", "-")
            overrides = [*COMMON, f"algo={name}", *options, f"run_dir={place}"]
            assert train(compose(overrides), overrides, str(place)) == 0
