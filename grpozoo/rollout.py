"""The decode loop: every prompt prefilled once, its cache expanded to the siblings, finished rows leave the batch.

Each token is chosen by the sampler and recorded with its log-probability under the law really sampled from. Token ids
travel end to end; text is decoded once, for the rewards, and never encoded again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache

from grpozoo.errors import UserError
from grpozoo.models.positions import check_length
from grpozoo.policy.finite import overflow
from grpozoo.policy.kv import GROW, expand, left_pad, select_rows
from grpozoo.policy.policy import Policy
from grpozoo.sampling import Choice, Law, TokenSampler
from grpozoo.types import Request, Rollouts

COMPACT = 0.8  # share of live rows below which the batch is rebuilt without the finished ones


class Record:
    """What is written down while decoding, for all rows of a call."""

    def __init__(self, requests: list[Request], max_tokens: int, policy: Policy):
        self.requests, self.policy = requests, policy
        self.stops = torch.tensor(sorted(policy.stop_ids), dtype=torch.int64)
        self.owner = [index for index, request in enumerate(requests) for _ in request.sample_ids]  # row -> request
        shape = (len(self.owner), max_tokens)
        self.ids = torch.zeros(shape, dtype=torch.int64)
        self.logprobs = torch.zeros(shape, dtype=torch.float32)
        self.lengths = torch.zeros(shape[0], dtype=torch.int64)
        self.stopped = torch.zeros(shape[0], dtype=torch.bool)

    def choice(self, law: Law, logits: Tensor, rows: Tensor, position: int) -> Choice:
        """The law of the next token of `rows` [n] from logits [n, V]; logits that make no law are a UserError."""
        choice = Choice(law.warp(logits))
        if bool((broken := choice.broken).any()):
            request = self.requests[self.owner[int(rows[broken.cpu()][0])]]
            raise overflow(self.policy.model, law, request.prompt.id, position)
        return choice

    def write(self, rows: Tensor, position: int, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """One token for each of `rows` [n]; returns [n] bool: the row goes on."""
        stops = torch.isin(tokens, self.stops)
        self.ids[rows, position], self.logprobs[rows, position] = tokens, logprobs
        self.lengths[rows] = position + 1
        self.stopped[rows] = stops
        return ~stops

    def rollouts(self, prompt_ids: list[tuple[int, ...]], design: dict[str, Tensor]) -> Rollouts:
        """The finished rows. prompt_ids: one for each request."""
        width = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        asked = [self.requests[index] for index in self.owner]
        lengths = self.lengths.tolist()
        return Rollouts(
            prompts=tuple(request.prompt for request in asked),
            group_id=torch.tensor([request.group_id for request in asked], dtype=torch.int64),
            sample_id=torch.tensor([s for request in self.requests for s in request.sample_ids], dtype=torch.int64),
            prompt_ids=tuple(prompt_ids[index] for index in self.owner),
            completion_ids=self.ids[:, :width].clone(),
            completion_mask=torch.arange(width) < self.lengths[:, None],
            logprobs=self.logprobs[:, :width].clone(),
            finish_reason=tuple("stop" if stopped else "length" for stopped in self.stopped.tolist()),
            text=tuple(self.policy.decode(ids[:n]) for ids, n in zip(self.ids.tolist(), lengths, strict=True)),
            tag=tuple(request.tag for request in asked),
            policy=tuple(request.policy for request in asked),
            design=design,
        )


def no_rollouts(policy: Policy) -> Rollouts:
    """What an engine answers to an empty list of requests: no rows."""
    return Record([], 1, policy).rollouts([], {})


def encode(
    requests: list[Request], policy: Policy, max_prompt_length: int, max_tokens: int = 0
) -> list[tuple[int, ...]]:
    """Token ids of each request's prompt; one that is empty or too long, alone or with its completion, is a UserError."""
    encoded = [policy.encode(request.prompt) for request in requests]
    for request, ids in zip(requests, encoded, strict=True):
        if not ids:
            raise UserError(f"prompt {request.prompt.id!r} is empty: the model needs at least one token to start from")
        if len(ids) > max_prompt_length:
            raise UserError(
                f"prompt {request.prompt.id!r} has {len(ids)} tokens, max_prompt_length is {max_prompt_length}\n"
                "raise max_prompt_length, or shorten or drop the prompt"
            )
    if encoded:
        length, longest = max((len(ids), request.prompt.id) for ids, request in zip(encoded, requests, strict=True))
        check_length(policy.model.config, longest, length, max_tokens)
    return encoded


@torch.no_grad()
def decode(
    requests: list[Request],
    sampler: TokenSampler,
    law: Law,
    policy: Policy,
    *,
    max_tokens: int,
    max_prompt_length: int,
    seed: int,
    step: int,
    rows_at_once: int = 512,
) -> Rollouts:
    """Sample all requests; rows of the result in the order of the requests and their sample_ids."""
    if not requests:
        return no_rollouts(policy)
    prompt_ids = encode(requests, policy, max_prompt_length, max_tokens)
    sampler.start(requests, seed, step, max_tokens)
    record = Record(requests, max_tokens, policy)
    for rows in _slabs(record.owner, prompt_ids, rows_at_once):
        _decode_slab(rows, record, prompt_ids, sampler, law, policy, max_tokens)
    return record.rollouts(prompt_ids, sampler.design())


def _slabs(owner: list[int], prompt_ids: list[tuple[int, ...]], size: int) -> Iterator[list[int]]:
    """Rows in portions, prompts of similar length together so that little is padded."""
    rows = sorted(range(len(owner)), key=lambda row: (len(prompt_ids[owner[row]]), owner[row], row))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _decode_slab(rows, record, prompt_ids, sampler, law, policy, max_tokens) -> None:
    device = policy.device
    prompts = {ids: index for index, ids in enumerate(dict.fromkeys(prompt_ids[record.owner[row]] for row in rows))}
    source = torch.tensor([prompts[prompt_ids[record.owner[row]]] for row in rows], device=device)
    ids, mask, positions = left_pad(list(prompts), device)
    padded = not bool(mask.all())
    cache = DynamicCache(config=policy.model.config)
    logits = policy.next_logits(ids, mask if padded else None, positions if padded else None, cache)[source]
    expand(cache, source, min(max_tokens, GROW))
    mask, following = mask[source], positions[source, -1:] + 1
    live = torch.tensor(rows)  # row numbers of the batch
    going = torch.ones(len(rows), dtype=torch.bool)  # not yet stopped
    for position in range(max_tokens):
        alive = going.nonzero()[:, 0]
        here = logits if len(alive) == len(live) else logits[alive.to(device)]
        choice = record.choice(law, here, live[alive], position)
        chosen = sampler.next(choice, live[alive], position)
        tokens = torch.zeros(len(live), dtype=torch.int64, device=device)
        tokens[alive.to(device)] = chosen
        going[alive] = record.write(live[alive], position, chosen.cpu(), choice.logprobs(chosen).cpu())
        if position + 1 == max_tokens or not bool(going.any()):
            break
        if int(going.sum()) <= COMPACT * len(live):
            keep = going.nonzero()[:, 0]
            there = keep.to(device)
            select_rows(cache, there)
            live, going, tokens, mask, following = live[keep], going[keep], tokens[there], mask[there], following[there]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits = policy.next_logits(tokens[:, None], mask if padded else None, following, cache)
        following = following + 1


def in_order(rollouts: Rollouts, requests: list[Request]) -> Rollouts:
    """Rows in the order of the requests and their sample ids, whoever generated them."""
    keys = zip(rollouts.tag, rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True)
    place = {key: row for row, key in enumerate(keys)}
    wanted = [(request.tag, request.group_id, sample) for request in requests for sample in request.sample_ids]
    if len(place) != len(rollouts) or len(wanted) != len(rollouts) or not all(key in place for key in wanted):
        raise UserError(
            "(tag, group_id, sample_id) must be unique in a call of generate(): a plugin asked for one twice"
        )
    return rollouts.select([place[key] for key in wanted])
