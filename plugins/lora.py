"""Low-rank adapters (LoRA, arXiv:2106.09685, sec. 4), through the package peft.

    W x + (alpha / rank) B A x       for every target matrix W [m, n]; A [rank, n], B [m, rank] train, W is frozen
    A random, B = 0                  at the start the policy is the model that was loaded

There is no dropout: a policy is sampled and scored by the same law. The reference is the adapter of the start, whatever
it is, not the bare model: a KL term is exactly 0 before the first update. Optimizer and checkpoints hold the adapter
alone; the final model is written with B A merged into W, a plain model again. Loss, advantage and sampling do not know
of it. With `layers` some blocks get an adapter and the states below the lowest one are kept (update.prefix_cache).
"""

from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from grpozoo import Plugin, UserError, hookimpl

MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Plugin):
    """`params=lora`."""

    @dataclass
    class Config:
        rank: int = 16  # r, at least 1; published 1 to 64
        alpha: float = 32.0  # the update is multiplied by alpha / rank; above 0
        targets: list[str] = field(default_factory=lambda: list(MATRICES))  # names of linear modules; [all-linear]: all
        layers: list[int] | None = None  # decoder blocks that get an adapter, 0 is the first; null: all
        seed: int = 0  # of the initial A

        def __post_init__(self):
            if self.rank < 1 or not self.alpha > 0:
                raise ValueError(f"rank is at least 1 and alpha above 0, got {self.rank} and {self.alpha}")
            if not self.targets or (self.layers is not None and not self.layers):
                raise ValueError("targets and layers name at least one: nothing would train")

    @hookimpl
    def validate(self):
        if find_spec("peft") is None:
            raise UserError('params=lora needs the package peft: pip install "grpozoo[lora]"')

    @hookimpl
    def select_parameters(self, policy):
        from peft import LoraConfig, inject_adapter_in_model

        config, before = self.config, {id(parameter) for parameter in policy.model.parameters()}
        outside = [index for index in config.layers or () if not 0 <= index < len(policy.blocks)]
        if outside:
            last = len(policy.blocks) - 1
            raise UserError(f"plugins.{self.name}.layers: there is no layer {outside[0]}; the model has 0 to {last}")
        adapter = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=0.0,
            target_modules="all-linear" if config.targets == ["all-linear"] else list(config.targets),
            layers_to_transform=config.layers,
        )
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            try:
                inject_adapter_in_model(adapter, policy.model)
            except ValueError as error:  # no module has such a name
                raise UserError(f"plugins.{self.name}.targets: {' '.join(str(error).split())[:300]}") from None
        for embedding in (policy.model.get_input_embeddings(), policy.model.get_output_embeddings()):
            if hasattr(embedding, "lora_A"):  # the core multiplies by their own weights, chunk by chunk
                raise UserError(
                    f"plugins.{self.name}.targets: embeddings and head take no adapter, only decoder blocks"
                )
        policy.model.requires_grad_(False).eval()
        added = [parameter for parameter in policy.model.parameters() if id(parameter) not in before]
        policy.plain = lambda: merged(policy.model)
        return [{"params": [parameter.requires_grad_(True) for parameter in added]}]


def merged(model):
    """A copy of the model with the adapters added to its own weights and taken away."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    vars(model).pop("peft_config", None)
    return model
