"""A language model as a policy: prompts in, log-probabilities and entropies of completion tokens out.

    logp_{i,t} = log p(o_{i,t} | prompt_i, o_{i,<t})     under the sampling law (temperature, truncation), nats
    H_{i,t}    = -sum_v p_v log p_v                      of the same law

Only positions that predict a completion token reach the head, a chunk of them at a time: logits of shape [rows, T, V]
never exist. With `shared_prefix` the prompt of several completions goes forward and backward once: its keys and values
are expanded to the siblings under autograd.

Where the first blocks are frozen (`freeze`) their states are kept for the batch that is trained on (`remember`), and
only the blocks above run.
"""

import inspect
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from grpozoo.models.text import decode, encode, encode_completion, stop_ids
from grpozoo.packing import pack
from grpozoo.policy.finite import overflow
from grpozoo.policy.frozen import Prefix, blocks_of, ending, keys, starting
from grpozoo.policy.head import head_logprobs, logits_logprobs
from grpozoo.policy.kv import left_pad, select_rows
from grpozoo.sampling import Law
from grpozoo.types import Output, Prompt, Rollouts

SHAPED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config entries of heads that are not linear


class Policy:
    """A causal language model with its tokenizer, always in evaluation mode: sampled and scored under one law."""

    def __init__(
        self,
        model,
        tokenizer,
        law: Law,
        chat_template: bool | None = None,
        logits_chunk: int = 512,
        special_tokens_in_data: bool = False,
    ):
        """logits_chunk: completion tokens whose logits exist at the same time."""
        self.model, self.tokenizer, self.law = model.eval(), tokenizer, law
        self.chat_template, self.logits_chunk = chat_template, logits_chunk
        self.special_tokens_in_data = special_tokens_in_data  # as control ids; False: as text
        self.stop_ids = stop_ids(model, tokenizer)
        self.backbone = model.get_decoder()
        accepted = inspect.signature(self.backbone.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self.linear_head = self._head_is_linear()
        self.blocks = blocks_of(self.backbone)  # decoder blocks, 0 is the first
        self.start = 0  # blocks below it are frozen and need no gradient to pass through
        self.prefix: Prefix | None = None  # their states, for the batch that is trained on

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, chat template applied."""
        return tuple(encode(self.tokenizer, prompt, self.chat_template, self.special_tokens_in_data))

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return decode(self.tokenizer, ids)

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text, no stop token added."""
        return encode_completion(self.tokenizer, text, self.special_tokens_in_data)

    def copy(self) -> "Policy":
        """Another policy with the same weights and law, its parameters apart and frozen."""
        model = deepcopy(self.model).requires_grad_(False)
        options = (self.chat_template, self.logits_chunk, self.special_tokens_in_data)
        return Policy(model, self.tokenizer, self.law, *options)

    @torch.no_grad()
    def mix(self, other: "Policy", share: float) -> None:
        """Move towards another policy: weights <- share * other + (1 - share) * own. share 1 is a copy."""
        for own, new in zip(self.model.parameters(), other.model.parameters(), strict=True):
            own.lerp_(new.detach().to(own.dtype), share)

    def plain(self):
        """The model to write to disk; whoever adds modules to the policy replaces this by a function that merges them."""
        return self.model

    def freeze(self) -> None:
        """Find out, once it is decided what trains, below which block nothing needs a gradient."""
        self.start, self.prefix = 0, None
        probe = torch.arange(4, device=self.device)[None] % self.model.config.get_text_config().vocab_size
        needed: list[bool] = []
        hooks = [
            block.register_forward_hook(
                lambda module, arguments, answer: needed.append(not torch.is_tensor(answer) or answer.requires_grad)
            )
            for block in self.blocks
        ]
        with torch.enable_grad():
            whole = self.hidden(probe, None, None).detach()
        for handle in hooks:
            handle.remove()
        start = next((number for number, wanted in enumerate(needed) if wanted), len(needed))
        if start == 0 or len(needed) != len(self.blocks):
            return
        with torch.no_grad():
            with ending(self.blocks, start) as seen:
                self.hidden(probe, None, None)
            with starting(self.blocks, start, seen[0], self._cache_name):
                again = self.hidden(probe, None, None)
        if torch.allclose(whole, again, rtol=1e-4, atol=1e-4):  # else more than states flows between blocks
            self.start = start

    def remember(
        self, rollouts: Rollouts | None, budget: int = 0, shared_prefix: bool = True, mine: list[int] | None = None
    ) -> None:
        """Keep the frozen blocks' states of these rows, in forwards of `budget` tokens, until other rows (or none) come.

        mine: the rows of this process, never in one forward with the others'; null: all.
        """
        if rollouts is None or not self.start:
            self.prefix = None
        elif self.prefix is None or self.prefix.keys != keys(rollouts):
            everything = list(range(len(rollouts)))
            own = everything if mine is None else mine
            others = sorted(set(everything) - set(own))
            parts = [part for rows in (own, others) for part in pack(rollouts, rows, budget, shared_prefix)]
            compute = self._prefix_shared if shared_prefix else self._prefix_plain
            self.prefix = Prefix(rollouts, parts, compute)

    def _remembered(self, rollouts: Rollouts) -> list[tuple[Tensor, Tensor]] | None:
        return None if self.prefix is None else self.prefix.of(rollouts)

    def _from(self, states: Tensor | None):
        """While it lasts, forwards begin with these states [n, T, d] of the frozen blocks (None: at the embedding)."""
        if states is None:
            return nullcontext()
        return starting(self.blocks, self.start, states, self._cache_name)

    def _prefix_plain(self, rollouts: Rollouts) -> list[tuple[Tensor, Tensor]]:
        mask = rollouts.completion_mask
        ids, prompt_lengths = self._sequences(rollouts, mask)
        with ending(self.blocks, self.start) as seen:
            self.hidden(ids, None, None)
        bounds = zip(prompt_lengths.tolist(), mask.sum(1).tolist(), strict=True)
        return [(row[:p], row[p : p + n - 1]) for row, (p, n) in zip(seen[0], bounds, strict=True)]

    def _prefix_shared(self, rollouts: Rollouts) -> list[tuple[Tensor, Tensor]]:
        mask = rollouts.completion_mask.to(self.device)
        with ending(self.blocks, self.start) as seen:
            self._shared_pass(rollouts, mask, None)
        prompts = {ids: index for index, ids in enumerate(dict.fromkeys(rollouts.prompt_ids))}
        width, none = seen[0].shape[1], seen[0].new_zeros(0, seen[0].shape[-1])
        return [
            (seen[0][prompts[ids], width - len(ids) :], seen[1][row, : n - 1] if n > 1 else none)
            for row, (ids, n) in enumerate(zip(rollouts.prompt_ids, mask.sum(1).tolist(), strict=True))
        ]

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
        self._check(flat[0].detach(), mask, rollouts)
        logprobs, entropies = (_scatter(values, mask) if values is not None else None for values in flat)
        return Output(logprobs, entropies)

    def _check(self, logprobs: Tensor, mask: Tensor, rollouts: Rollouts) -> None:
        """Refuse log-probabilities [N] of completion tokens that are no numbers."""
        if not bool(logprobs.isfinite().all()):
            row, position = mask.nonzero()[int(logprobs.isfinite().logical_not().nonzero()[0])].tolist()
            raise overflow(self.model, self.law, rollouts.prompts[row].id, position)

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
        with self._from(self._whole(rollouts)):
            return self.hidden(ids, None, None)[row, position]

    def _whole(self, rollouts: Rollouts) -> Tensor | None:
        """Remembered states of prompt and completion side by side, padded as `_sequences`."""
        kept = self._remembered(rollouts)
        return None if kept is None else pad_sequence([torch.cat(pair) for pair in kept], batch_first=True)

    def _logits_plain(self, rollouts: Rollouts, mask: Tensor) -> Tensor:
        """[N, V] for heads that are not linear: the model's own logits from the first completion token on."""
        ids, prompt_lengths = self._sequences(rollouts, mask)
        row, position = self._predicting(mask, prompt_lengths)
        first = int(prompt_lengths.min()) - 1
        with self._from(self._whole(rollouts)):
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits
        return logits[row, position - first]

    def _states_shared(self, rollouts: Rollouts, mask: Tensor) -> Tensor:
        """[N, d]: prompts once, left-padded; their keys and values expanded to the completions under autograd."""
        states = self._shared_pass(rollouts, mask, self._remembered(rollouts))
        row, offset = mask.nonzero(as_tuple=True)
        return states[row, offset]

    def _shared_pass(self, rollouts: Rollouts, mask: Tensor, kept: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        """[r, width, d]: the state before each completion token; from `kept` states of the frozen blocks if there are."""
        prompts = {ids: index for index, ids in enumerate(dict.fromkeys(rollouts.prompt_ids))}
        owner = torch.tensor([prompts[ids] for ids in rollouts.prompt_ids], device=self.device)  # [r]
        ids, prompt_mask, positions = left_pad(list(prompts), self.device)
        padded = not bool(prompt_mask.all())
        cache = DynamicCache()
        before = after = None  # states of the frozen blocks: of the prompts [p, P, d], of the completions [r, width, d]
        if kept is not None:
            first = {ids: pair[0] for ids, pair in reversed(list(zip(rollouts.prompt_ids, kept, strict=True)))}
            before = pad_sequence([first[ids] for ids in prompts], batch_first=True, padding_side="left")
            after = pad_sequence([pair[1] for pair in kept], batch_first=True)
        with self._from(before):
            states = self.hidden(ids, prompt_mask if padded else None, positions if padded else None, cache)
        states = states[:, -1][owner][:, None]  # [r, 1, d] predicts the first token
        if mask.shape[1] > 1 and bool(mask[:, 1:].any()):
            width = int(mask.sum(1).max()) - 1
            select_rows(cache, owner)
            lengths = prompt_mask.sum(1)[owner][:, None]
            positions = lengths + torch.arange(width, device=self.device)
            full = torch.cat([prompt_mask[owner], mask[:, :width]], 1) if padded else None
            completion = rollouts.completion_ids[:, :width].to(self.device)
            with self._from(after):
                more = self.hidden(completion, full, positions, cache)
            states = torch.cat([states, more], 1)  # [r, 1 + width, d]
        return states


def _scatter(flat: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
