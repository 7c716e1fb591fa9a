"""What hooks and the loop ask of a run: prompts, completions, rewards, verdicts."""

import weakref

import torch

from grpozoo.errors import UserError
from grpozoo.evaluate import verdicts
from grpozoo.models.text import special_tokens
from grpozoo.rewards.asking import collective
from grpozoo.rewards.score import score
from grpozoo.rollout import in_order
from grpozoo.sampling import Greedy, Law
from grpozoo.types import Prompt, Request, Rewards, Rollouts, concatenate


class Ask:
    """The questions, with the run that hooks are handed. Every process asks the same and gets the same answer."""

    def __init__(self, run):
        self._run = weakref.ref(run)  # a run that is over leaves memory at once, its model too

    @property
    def run(self):
        """The run that asks."""
        return self._run()

    @collective
    def prompts(self, count: int) -> list[Prompt]:
        """The next prompts of the training data, as the plugins prepare them."""
        return self.run.hooks.prepare_prompts(prompts=self.run.data.take(count), run=self.run)

    @collective
    def generate(self, requests: list[Request], temperature: float | None = None) -> Rollouts:
        """Completions for the requests, in their order; the work is divided over the processes.

        temperature: null = the run's; 0 = greedy. Truncation (top-k, top-p, min-p) applies to training only.
        """
        with self.run.timer("time/generate_s"):
            return self._generate(requests, temperature)

    def _generate(self, requests: list[Request], temperature: float | None) -> Rollouts:
        run = self.run
        law = run.policy.law if temperature is None else Law(temperature)
        sampler = Greedy() if law.temperature == 0 else run.hooks.token_sampler(run=run)
        mine = requests[run.rank :: run.world]
        parts = []
        # in every process, also for no requests: servers and sharded models need all of them
        for name in sorted({request.policy for request in requests}) or ["policy"]:
            if name not in run.policies:
                raise UserError(f"a request names the policy {name!r}, this run has {', '.join(run.policies)}")
            asked = [request for request in mine if request.policy == name]
            parts.append(
                run.hooks.generate(requests=asked, sampler=sampler, law=law, policy=run.policies[name], run=run)
            )
        return in_order(concatenate(run.gather(parts)), requests)

    def given(self, requests: list[Request], texts: list[str]) -> Rollouts:
        """Completions that nobody sampled (traces of another policy): one text for each request, its stop token added.

        Cut at max_completion_length. The requests name their source in `policy`; log-probabilities are 0.
        """
        policy, longest = self.run.policy, self.run.config.max_completion_length
        stop = min(policy.stop_ids)
        rows = []
        for request, text in zip(requests, texts, strict=True):
            if len(request.sample_ids) != 1 or request.policy in self.run.policies:
                raise UserError("given() takes requests of one sample each whose policy is none of the run's")
            if not policy.special_tokens_in_data and (found := special_tokens(policy.tokenizer, text)):
                self.run.say(
                    f"completions of {request.policy!r} hold special tokens of the tokenizer, such as {found[0]!r}: they are read "
                    "as text\nif the model is to write them: model.special_tokens_in_data=true"
                )
            rows.append([*policy.encode_completion(text), stop])
        lengths = torch.tensor([min(len(row), longest) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            ids[row, : lengths[row]] = torch.tensor(tokens[: lengths[row]])
        return Rollouts(
            prompts=tuple(request.prompt for request in requests),
            group_id=torch.tensor([request.group_id for request in requests]),
            sample_id=torch.tensor([request.sample_ids[0] for request in requests]),
            prompt_ids=tuple(policy.encode(request.prompt) for request in requests),
            completion_ids=ids,
            completion_mask=mask,
            logprobs=torch.zeros(mask.shape),
            finish_reason=tuple("stop" if len(row) <= n else "length" for row, n in zip(rows, lengths, strict=True)),
            text=tuple(texts),
            tag=tuple(request.tag for request in requests),
            policy=tuple(request.policy for request in requests),
        )

    def verdicts(self, rollouts: Rollouts, rewards: Rewards) -> torch.Tensor:
        """[R] float64, 1 right, 0 wrong, NaN unknown: what evaluation calls right, whatever shapes the rewards."""
        return torch.tensor(verdicts(self.run, rollouts, rewards), dtype=torch.float64)

    @collective
    def score(self, rollouts: Rollouts) -> Rewards:
        """Rewards of the rollouts, shaped. The main process asks the reward plugins; an error reaches every process."""
        run = self.run
        with run.timer("time/reward_s"):
            answer: list = [None, None]
            cause: UserError | None = None  # with the traceback, which the other processes cannot have
            if run.processes.main:
                try:
                    answer[0] = score(run.hooks, run.plugins, rollouts, run, timeout=run.config.reward_timeout)
                except UserError as error:
                    answer[1], cause = str(error), error
            rewards, message = run.processes.told(answer)
            if message is not None:
                raise cause or UserError(message)
            return run.hooks.transform_rewards(rollouts=rollouts, rewards=rewards, run=run)
