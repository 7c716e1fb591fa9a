"""`grpozoo warm-start`: train the tiny policy's starting weights for a task and size, whether they exist or not."""

import sys

from omegaconf import DictConfig

from grpozoo.compose.settings import read_core
from grpozoo.compose.task import load_task
from grpozoo.errors import UserError


def run(config: DictConfig) -> int:
    """Train into the cache, where `model=tiny` finds them, and say how well they do; the exit status."""
    settings = read_core(config)
    if settings.model.path is not None or settings.model.kind != "tiny":
        raise UserError("warm-start trains the starting weights of model=tiny; other models bring theirs")
    task = load_task(settings.task)
    from grpozoo.models.warm_start import regenerate

    folder, result, note = regenerate(settings.model, task)
    greedy, sampled = result["greedy"], result["sampled"]
    print(f"warm start of {result['steps']} steps: held-out accuracy {greedy:.1%} greedy, {sampled:.1%} sampled")
    print(folder)
    if note:
        print(note, file=sys.stderr)
    return 0
