"""Training of some decoder layers, the rest frozen (arXiv:2607.01232, "Is One Layer Enough?", sec. 3 and 5).

    theta_k <- theta_k - lr scale_k grad_k loss      k in S; every other parameter keeps its bits
    C(k) = (S_k - S_base) / (S_full - S_base)        contribution of layer k, from `grpozoo layer-scan`

    layer, which   S as given; index 0 is the first block, -1 the last
    middle         Mid-k: S = floor(L/2 - k/2), ..., floor(L/2 + k/2) - 1           L blocks, no profile needed
    top            Only B_k: the k largest C; equal ones by lower index             worst: the k smallest (W_k)
    random         k of the L blocks
    boost          Boost B_k: everything trains, the k best blocks at boost_factor times the learning rate

A layer is a whole block: attention, MLP and their norms. Embeddings, last norm and head are frozen unless boost is
chosen. Loss, advantage and sampling do not know of it, so it stacks with all of them. The gradient stops at the lowest
layer of S; the core keeps the states below it for a batch (update.prefix_cache), and a reference is |S| layers.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from grpozoo import Plugin, UserError, hookimpl

RULES = ("layer", "which", "middle", "top", "random", "boost")


class Layers(Plugin):
    """`params=single_layer`, `params=layers`, `params=middle`, `params=top`."""

    @dataclass
    class Config:
        layer: int | None = None  # one layer; null with no other rule: middle=1
        which: list[int] | None = None  # layers, each once
        middle: int | None = None  # k layers around the middle, at least 1; published 5 and 10 of 28 and 36
        top: int | None = None  # k best layers of the profile, at least 1; published 5 and 10
        random: int | None = None  # k layers by chance, at least 1
        boost: int | None = None  # all parameters, the k best layers faster; at least 1; published 5 and 10
        profile: str | None = None  # top, boost: profile.json of `grpozoo layer-scan`
        worst: bool = False  # top, boost: the k worst layers of the profile, the paper's control
        boost_factor: float = 2.0  # boost: learning rate of its layers over that of the rest, above 0
        scale: list[float] | None = None  # factors of the learning rate, for the chosen layers by index; null: 1
        seed: int = 0  # random: which ones

        def __post_init__(self):
            rules = [name for name in RULES if getattr(self, name) is not None]
            if len(rules) > 1:
                raise ValueError(f"{' and '.join(rules)} are different rules: leave one, set the others to null")
            for name in ("middle", "top", "random", "boost"):
                if getattr(self, name) is not None and getattr(self, name) < 1:
                    raise ValueError(f"{name} is at least 1 layer, got {getattr(self, name)}")
            if self.which is not None and not self.which:
                raise ValueError("which=[] names no layer: nothing would train")
            if (self.top or self.boost) and not self.profile:
                raise ValueError("top and boost need profile=FILE, the profile.json of `grpozoo layer-scan`")
            for name, unset, readers in (
                ("profile", None, ("top", "boost")),
                ("worst", False, ("top", "boost")),
                ("boost_factor", 2.0, ("boost",)),
                ("seed", 0, ("random",)),
            ):
                if getattr(self, name) != unset and not any(getattr(self, rule) for rule in readers):
                    raise ValueError(f"{name} is for {' and '.join(readers)} alone: set one of them, or leave it out")
            if not self.boost_factor > 0 or any(not factor > 0 for factor in self.scale or ()):
                raise ValueError("boost_factor and the numbers in scale are above 0")

    def __init__(self, config):
        super().__init__(config)
        self.notice = ""

    @hookimpl
    def validate(self):
        if self.config.profile:
            contributions(Path(self.config.profile))

    @hookimpl
    def select_parameters(self, policy):
        blocks = policy.blocks
        if not blocks:
            kind = type(policy.backbone).__name__
            raise UserError(f"plugins.{self.name}: a {kind} has no list `layers` to choose from; use params=full")
        chosen = self.choose(len(blocks))
        scale = self.config.scale or [1.0] * len(chosen)
        if len(scale) != len(chosen):
            raise UserError(f"plugins.{self.name}.scale has {len(scale)} numbers for the {len(chosen)} layers {chosen}")
        boost = self.config.boost is not None
        policy.model.requires_grad_(boost)
        groups = []
        for index, factor in zip(chosen, scale, strict=True):
            parameters = list(blocks[index].requires_grad_(True).parameters())
            factor *= self.config.boost_factor if boost else 1
            groups.append({"params": parameters, "lr_scale": factor})
        if boost:
            faster = {id(parameter) for group in groups for parameter in group["params"]}
            groups.append({"params": [p for p in policy.model.parameters() if id(p) not in faster]})
        return groups

    @hookimpl
    def setup(self, run):
        if self.notice:
            run.say(self.notice)

    def choose(self, L):
        """The chosen layers of L, ascending."""
        config = self.config
        if config.layer is not None or config.which is not None:
            return self.indices([config.layer] if config.which is None else config.which, L)
        wanted = config.middle or config.top or config.random or config.boost or 1
        k = min(wanted, L)
        if k < wanted:
            self.notice = f"plugins.{self.name}: {wanted} layers are asked for and the model has {L}: all of them"
        if config.random:
            return sorted(random.Random(config.seed).sample(range(L), k))
        if config.top or config.boost:
            C = contributions(Path(config.profile))
            known = [index for index in range(L) if math.isfinite(C.get(index, math.nan))]
            if len(known) < k:
                raise UserError(
                    f"{config.profile} has a contribution for {len(known)} of the {L} layers, {k} are wanted"
                )
            sign = 1 if config.worst else -1
            return sorted(sorted(known, key=lambda index: (sign * C[index], index))[:k])
        return list(range(math.floor(L / 2 - k / 2), math.floor(L / 2 + k / 2)))

    def indices(self, given, L):
        outside = [index for index in given if not -L <= index < L]
        if outside:
            raise UserError(
                f"plugins.{self.name}: there is no layer {outside[0]}; the model has 0 to {L - 1}, or -1 to {-L}"
            )
        found = sorted(index % L for index in given)
        if len(set(found)) < len(found):
            raise UserError(f"plugins.{self.name}.which={given} names a layer twice")
        return found


def contributions(file):
    """Layer -> C of a profile; NaN where it is undefined."""
    try:
        C = json.loads(file.expanduser().read_text())["C"]
        return {int(index): math.nan if value is None else float(value) for index, value in C.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'plugins.layers.profile={file} does not read: {error!r}\nit is JSON like {{"C": {{"0": 0.89, "1": 0.87}}}}, '
            "as `grpozoo layer-scan` writes it"
        ) from None
