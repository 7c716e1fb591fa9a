"""The plain twin of the native engine: transformers' own generate(), with the same sampler and the same record.

A logits processor asks the sampler for the token and leaves only that token possible; generate() then "greedily"
takes it. Finished rows stay in the batch and every completion carries its own copy of the prompt.
"""

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from grpozoo import Plugin, hookimpl
from grpozoo.policy.policy import left_pad
from grpozoo.rollout import Record, encode, no_rollouts


class Chosen(LogitsProcessor):
    """Forces the sampler's token, and writes it down."""

    def __init__(self, record, sampler, law, pad_id):
        self.record, self.sampler, self.law, self.pad_id = record, sampler, law, pad_id
        self.position, self.going = 0, torch.ones(len(record.owner), dtype=torch.bool)

    def __call__(self, input_ids, scores):
        forced = torch.full((len(scores),), self.pad_id, device=scores.device)
        rows = self.going.nonzero()[:, 0]
        if len(rows):
            there = rows.to(scores.device)
            choice = self.record.choice(self.law, scores[there], rows, self.position)
            tokens = self.sampler.next(choice, rows, self.position)
            forced[there] = tokens
            self.going[rows] = self.record.write(rows, self.position, tokens.cpu(), choice.logprobs(tokens).cpu())
        self.position += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, forced[:, None], 0.0)


class Hf(Plugin):
    """`engine=hf`."""

    @hookimpl
    def generate(self, requests, sampler, law, policy, run):
        if not requests:
            return no_rollouts(policy)
        max_tokens = run.config.max_completion_length
        prompt_ids = encode(requests, policy, run.config.max_prompt_length, max_tokens)
        sampler.start(requests, run.config.seed, run.step, max_tokens)
        record = Record(requests, max_tokens, policy)
        ids, mask, _ = left_pad([prompt_ids[index] for index in record.owner], policy.device)
        pad_id = min(policy.stop_ids, default=0)
        plain = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(policy.stop_ids) or None,
            pad_token_id=pad_id,
        )
        own = policy.model.generation_config  # its penalties would change the law
        policy.model.generation_config = plain
        try:
            with torch.no_grad():
                policy.model.generate(
                    input_ids=ids,
                    attention_mask=mask.long(),
                    logits_processor=LogitsProcessorList([Chosen(record, sampler, law, pad_id)]),
                )
        finally:
            policy.model.generation_config = own
        return record.rollouts(prompt_ids, sampler.design())
