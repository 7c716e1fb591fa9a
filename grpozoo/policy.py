"""A language model as a policy: prompts in, log-probabilities and entropies of completion tokens out.

    logp_{i,t} = log p(o_{i,t} | prompt_i, o_{i,<t})     under the sampling law (temperature, truncation), nats
    H_{i,t}    = -sum_v p_v log p_v                      of the same law

Only positions that predict a completion token reach the head, a chunk of them at a time: logits of shape [rows, T, V]
never exist. With `shared_prefix` the prompt of several completions goes forward and backward once: its keys and values
are expanded to the siblings under autograd.
"""

import inspect
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from grpozoo import models
from grpozoo.errors import UserError
from grpozoo.sampling import Law
from grpozoo.types import Output, Prompt, Rollouts

SHAPED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config entries of heads that are not linear


class Policy:
    """A causal language model with its tokenizer, always in evaluation mode: sampled and scored under one law."""

    def __init__(self, model, tokenizer, law: Law, chat_template: bool | None = None, logits_chunk: int = 512):
        """logits_chunk: completion tokens whose logits exist at the same time."""
        self.model, self.tokenizer, self.law = model.eval(), tokenizer, law
        self.chat_template, self.logits_chunk = chat_template, logits_chunk
        self.stop_ids = models.stop_ids(model, tokenizer)
        self.backbone = model.get_decoder()
        accepted = inspect.signature(self.backbone.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self.linear_head = self._head_is_linear()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, chat template applied."""
        return tuple(models.encode(self.tokenizer, prompt, self.chat_template))

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return models.decode(self.tokenizer, ids)

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def copy(self) -> "Policy":
        """Another policy with the same weights and law, its parameters apart and frozen."""
        model = deepcopy(self.model).requires_grad_(False)
        return Policy(model, self.tokenizer, self.law, self.chat_template, self.logits_chunk)

    @torch.no_grad()
    def mix(self, other: "Policy", share: float) -> None:
        """Move towards another policy: weights <- share * other + (1 - share) * own. share 1 is a copy."""
        for own, new in zip(self.model.parameters(), other.model.parameters(), strict=True):
            own.lerp_(new.detach().to(own.dtype), share)

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        """Whether logits are the output embedding times the last hidden state (no soft-cap, no scale)."""
        config = self.model.config.get_text_config()
        if any(getattr(config, name, None) not in (None, 1, 1.0) for name in SHAPED):
            return False  # a cap may be invisible at the small logits of the probe
        probe = torch.arange(4, device=self.device)[None] % self.model.config.get_text_config().vocab_size
        head = self.model.get_output_embeddings()
        if head is None:
            return False
        expected = self.model(input_ids=probe, use_cache=False).logits.float()
        states = getattr(self.backbone(input_ids=probe, use_cache=False), "last_hidden_state", None)
        if states is None:
            return False
        found = head(states).float()
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)

    def hidden(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache=None) -> Tensor:
        """Last hidden states [n, T, d]; appends to `cache` if there is one."""
        arguments = {"input_ids": ids, "attention_mask": mask, self._cache_name: cache, "use_cache": cache is not None}
        if positions is not None and self._takes_positions:
            arguments["position_ids"] = positions
        return self.backbone(**arguments).last_hidden_state

    def next_logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache) -> Tensor:
        """Logits [n, V] of the token after the last column of ids [n, T]."""
        if self.linear_head:
            return self.model.get_output_embeddings()(self.hidden(ids, mask, positions, cache)[:, -1])
        arguments = {self._cache_name: cache}
        if positions is not None and self._takes_positions:
            arguments["position_ids"] = positions
        return self.model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **arguments).logits[
            :, -1
        ]

    def output(self, rollouts: Rollouts, entropy: bool = False, shared_prefix: bool = True) -> Output:
        """Log-probabilities (and entropies) [r, T] of the rows' completion tokens, with gradient if grad is enabled."""
        mask = rollouts.completion_mask.to(self.device)
        targets = rollouts.completion_ids.to(self.device)[mask]  # [N]
        if not len(targets):
            nothing = next(self.model.parameters()).new_zeros(mask.shape, dtype=torch.float32)
            return Output(nothing, nothing if entropy else None)
        if self.linear_head:
            states = self.states(rollouts, shared_prefix)
            head = self.model.get_output_embeddings()
            flat = head_logprobs(states, head.weight, head.bias, targets, self.law, entropy, self.logits_chunk)
        else:
            flat = logits_logprobs(self._logits_plain(rollouts, mask), targets, self.law, entropy)
        logprobs, entropies = (_scatter(values, mask) if values is not None else None for values in flat)
        return Output(logprobs, entropies)

    def states(self, rollouts: Rollouts, shared_prefix: bool = True) -> Tensor:
        """[N, d], the last hidden state before each completion token, in the order of rollouts.completion_mask."""
        mask = rollouts.completion_mask.to(self.device)
        return (self._states_shared if shared_prefix else self._states_plain)(rollouts, mask)

    @torch.no_grad()
    def covariance(self, rollouts: Rollouts) -> Tensor:
        """Cov_p(p, ln p) = sum_v p_v^2 (ln p_v + H) of the law before each completion token [r, T] float32, 0 where masked.

        With it an update that raises the log-probability of a token a by eta changes the entropy of its position by
        -eta (p_a (ln p_a + H) - Cov), in nats, to first order in the logits (arXiv:2606.19236).
        """
        mask = rollouts.completion_mask.to(self.device)
        targets = rollouts.completion_ids.to(self.device)[mask]  # [N]
        if not len(targets):
            return torch.zeros(mask.shape, device=self.device)
        if self.linear_head:
            head = self.model.get_output_embeddings()
            parts = ((head(h), t) for h, t in zip(*self._chunks(self.states(rollouts), targets), strict=True))
        else:
            parts = zip(*self._chunks(self._logits_plain(rollouts, mask), targets), strict=True)
        flat = []
        for logits, tokens in parts:
            logp = self.law.warp(logits, tokens).log_softmax(-1)
            p, finite = logp.exp(), logp.masked_fill(logp == -torch.inf, 0)
            entropy = -(p * finite).sum(-1, keepdim=True)
            flat.append((p**2 * (finite + entropy)).sum(-1))
        return _scatter(torch.cat(flat), mask)

    def _chunks(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        return [tensor.split(self.logits_chunk) for tensor in tensors]

    @contextmanager
    def training(self, checkpointing: bool):
        """While gradients are taken. Activations are recomputed if `checkpointing`, which transformers does only in
        training mode; dropout is zero, so the law stays the one that was sampled from. The mode is restored."""
        if checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()
        try:
            yield
        finally:
            if checkpointing:
                self.model.gradient_checkpointing_disable()
                self.model.eval()

    def _sequences(self, rollouts: Rollouts, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Prompt and completion side by side, padded on the right: ids [r, S], and the prompts' lengths [r]."""
        lengths, completions = mask.sum(1).tolist(), rollouts.completion_ids
        rows = [
            torch.cat([torch.tensor(prompt), completions[row, : max(lengths[row] - 1, 0)].cpu()])
            for row, prompt in enumerate(rollouts.prompt_ids)
        ]
        return pad_sequence(rows, batch_first=True).to(self.device), torch.tensor([len(p) for p in rollouts.prompt_ids])

    def _predicting(self, mask: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Row and position of the state that predicts each completion token [N], in row-major order."""
        row, offset = mask.nonzero(as_tuple=True)
        return row, offset + prompt_lengths.to(mask.device)[row] - 1

    def _states_plain(self, rollouts: Rollouts, mask: Tensor) -> Tensor:
        """[N, d]: one forward over whole sequences. Causal attention makes a mask for right padding superfluous."""
        ids, prompt_lengths = self._sequences(rollouts, mask)
        row, position = self._predicting(mask, prompt_lengths)
        return self.hidden(ids, None, None)[row, position]

    def _logits_plain(self, rollouts: Rollouts, mask: Tensor) -> Tensor:
        """[N, V] for heads that are not linear: the model's own logits from the first completion token on."""
        ids, prompt_lengths = self._sequences(rollouts, mask)
        row, position = self._predicting(mask, prompt_lengths)
        first = int(prompt_lengths.min()) - 1
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits
        return logits[row, position - first]

    def _states_shared(self, rollouts: Rollouts, mask: Tensor) -> Tensor:
        """[N, d]: prompts once, left-padded; their keys and values expanded to the completions under autograd."""
        prompts = {ids: index for index, ids in enumerate(dict.fromkeys(rollouts.prompt_ids))}
        owner = torch.tensor([prompts[ids] for ids in rollouts.prompt_ids], device=self.device)  # [r]
        ids, prompt_mask, positions = left_pad(list(prompts), self.device)
        padded = not bool(prompt_mask.all())
        cache = DynamicCache()
        after_prompt = self.hidden(ids, prompt_mask if padded else None, positions if padded else None, cache)[:, -1]
        states = after_prompt[owner][:, None]  # [r, 1, d] predicts the first token
        if mask.shape[1] > 1 and bool(mask[:, 1:].any()):
            width = int(mask.sum(1).max()) - 1
            select_rows(cache, owner)
            lengths = prompt_mask.sum(1)[owner][:, None]
            positions = lengths + torch.arange(width, device=self.device)
            full = torch.cat([prompt_mask[owner], mask[:, :width]], 1) if padded else None
            completion = rollouts.completion_ids[:, :width].to(self.device)
            states = torch.cat([states, self.hidden(completion, full, positions, cache)], 1)  # [r, 1 + width, d]
        row, offset = mask.nonzero(as_tuple=True)
        return states[row, offset]


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """The rows [n] (repeats allowed) of a cache, in place and under autograd."""
    for layer in cache.layers:
        if not hasattr(layer, "batch_select_indices"):
            raise UserError(
                f"this model keeps a {type(layer).__name__}, which cannot be expanded to the completions of a prompt\n"
                "use engine=hf update.shared_prefix=false"
            )
        layer.batch_select_indices(rows)


def left_pad(prompts: list[tuple[int, ...]], device) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged ids -> ids [n, P] padded on the left, mask [n, P] bool, positions [n, P] counted from the first real id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    start = torch.tensor([width - len(prompt) for prompt in prompts], device=device)[:, None]
    positions = torch.arange(width, device=device) - start
    return ids, positions >= 0, positions.clamp(min=0)


def _scatter(flat: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def logits_logprobs(logits: Tensor, targets: Tensor, law: Law, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """The plain form: logits [N, V] -> log-probabilities [N] and entropies [N] of the law, float32."""
    logp = law.warp(logits, targets).log_softmax(-1)
    entropies = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1) if entropy else None
    return logp.gather(-1, targets[:, None])[:, 0], entropies


def head_logprobs(
    states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, law: Law, entropy: bool, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """`logits_logprobs(states @ weight.T + bias, ...)` in chunks of tokens; logits are recomputed in the backward."""
    logprobs, entropies = _HeadLogprobs.apply(states, weight, bias, targets, law, entropy, chunk)
    return logprobs, entropies if entropy else None


class _HeadLogprobs(torch.autograd.Function):
    """With p the law and z the scaled logits:  d logp_a / dz = 1[a] - p,   dH / dz_v = -p_v (log p_v + H)."""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, law, entropy, chunk):
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.law, ctx.chunk = law, chunk
        parts = [
            logits_logprobs(torch.nn.functional.linear(h, weight, bias), t, law, entropy)
            for h, t in zip(states.split(chunk), targets.split(chunk), strict=True)
        ]
        logprobs = torch.cat([part[0] for part in parts])
        entropies = torch.cat([part[1] for part in parts]) if entropy else torch.zeros_like(logprobs)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.entropy = entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        states, weight, bias, targets = ctx.saved_tensors
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        scale = 1 / (ctx.law.temperature or 1.0)
        for start in range(0, len(states), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = ctx.law.warp(torch.nn.functional.linear(states[part], weight, bias), targets[part]).log_softmax(-1)
            p = logp.exp()
            if ctx.entropy:
                logp = logp.masked_fill_(logp == -torch.inf, 0)
                entropy = -(p * logp).sum(-1, keepdim=True)
                grad = logp.add_(entropy).mul_(p).mul_(-grad_entropies[part, None]).sub_(p * grad_logprobs[part, None])
            else:
                grad = p.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad = grad.mul_(scale).to(states.dtype)
            torch.matmul(grad, weight, out=grad_states[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, states[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_states, grad_weight, grad_bias, None, None, None, None
