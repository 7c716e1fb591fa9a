"""The two policies of the study: a short task with one right answer, and such an answer after long free text.

    short      12+35=  ->  47                      two or three tokens; the answer is one interval of code space
    long       12+35=  ->  40 random letters#47    the answer comes after about 190 bits; nothing to gain (control)

Both are decoders of two layers, warm-started until a few of the sampled answers are right, and kept in the cache. `short`
has learnt from worked answers of which nine in ten are a digit or a carry off: it knows the sum, says it in one of ten
samples, and spreads the others, so reinforcement learning has something to concentrate. `long` has learnt from right
answers, briefly.
"""

import random
from dataclasses import replace
from pathlib import Path

from grpozoo.config import Model
from grpozoo.models.warm_start import Recipe, ensure
from grpozoo.tasks import Task
from grpozoo.tasks.arithmetic import Arithmetic
from grpozoo.tasks.hashing import stable_int

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCRATCH = 40  # letters before the answer
SHAPE = Model(layers=2, width=64, heads=4)


class Long(Arithmetic):
    """Letters that mean nothing, then `#` and the answer."""

    def solution(self, prompt):
        """The letters differ from prompt to prompt, so all that can be learnt of them is that they are uniform."""
        rng = random.Random(stable_int("scratch", prompt.id))
        return "".join(rng.choices(LETTERS, k=SCRATCH)) + "#" + prompt.answer


TASKS = {  # name -> class, options, recipe, tokens of a completion
    "short": (
        Arithmetic,
        Arithmetic.Config(level=1, scratchpad=False, corrupt=0.9),
        Recipe(careless=0.0, lr=6e-3, target=0.9, cooldown=300),  # never reached: always 900 steps
        6,
    ),
    "long": (Long, Arithmetic.Config(level=1), Recipe(careless=0.0, target=0.05, cooldown=20), SCRATCH + 8),
}


def policy(name: str, seed: int = 0, warm_steps: int | None = None) -> tuple[Task, Path, int]:
    """The task, the folder of its warm-started policy (made now if it is not there), and the tokens that it may take.

    warm_steps: at most so many; null: the recipe's number.
    """
    kind, options, recipe, tokens = TASKS[name]
    task, steps = kind(replace(options)), warm_steps or recipe.max_steps
    return task, ensure(SHAPE, task, replace(recipe, seed=seed, max_steps=steps)), tokens
