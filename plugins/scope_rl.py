"""SCOPE-RL: reward for the way before success and after it (arXiv:2607.11506).

    rbar   = mean of 1[right] over the group, original prompt
    ASR    a group with rbar < tau and sub-questions is drawn again with them, and the new completions replace the old:
           R = beta/m sum_i Pi_i + (1 - beta) Pi_m 1[right]                 Pi_i = sub-answers 1..i of m are all right
    QPR    R = S_u Phi kappa for a right completion, 0 for a wrong one      labels of its N steps by a judge
           S_u = share of useful steps                                      kappa = 1 / (1 + alpha ln(N + 1))
           Phi = prod_k (1 - lambda_k r_k)                                  r_k = share of steps with label k
    the first half of the run is ASR, the second QPR; both change the scalar reward of a completion and nothing else

R takes the place of the outcome 1[right] at its weight; other rewards (format, length) stay in the total. An original
prompt that is not drawn again keeps its outcome in ASR. Where the judge fails, R is the mean of the group's other right
completions, or 1/2. A schedule never goes back: a run that is resumed with more steps stays in QPR.

It stacks on any advantage, loss and weight that reads totals; whatever scores a completion of a prompt with sub-questions
(a greedy baseline) gets its prefix reward. It applies before dynamic sampling, so that a group is repaired before it is
judged; the rows of a second pass carry the tag `scaffold`, for which the random streams differ. Evaluation is never
shaped: accuracy is that of original prompts.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch

from grpozoo import Plugin, Request, UserError, concatenate, group_equal, group_mean, group_std, hookimpl
from grpozoo.errors import unknown
from grpozoo.rewards.judge import LABELS, EndpointJudge, RuleJudge
from grpozoo.tasks.scaffold import asks, correct_steps, main_answer, read_chain, same, scaffolded

OUTCOMES = ("answer", "numeric", "math")  # rewards that say what is right
TAG = "scaffold"  # Request.tag of the second pass
Stage = Enum("Stage", ["asr", "qpr", "schedule", "mix"])
Judges = Enum("Judges", ["rule", "endpoint"])
READ = {  # stage -> options that it alone reads
    Stage.asr: ("tau", "beta", "column"),
    Stage.qpr: (*(f"lambda_{label}" for label in LABELS[1:]), "alpha", "judge", "url", "model", "timeout", "workers"),
}
ANOTHER = "it makes a total of its own, and scope_rl puts R in the place of the outcome in the total"


class ScopeRl(Plugin):
    """`algo=scope_rl`."""

    order = 40
    conflicts = {
        "gdpo": "it exchanges the outcome in the total, and gdpo reads the components that the total was made of",
        "process": "process reads the rewards of steps, scope_rl changes totals: it would have no effect",
        **dict.fromkeys(("vpo", "multi_rlvr", "random_weighting"), ANOTHER),
    }
    metrics = {
        "stage": "number: 1 ASR, 2 QPR, 1.5 both",
        "accuracy": "share of completions, 0 to 1: right, of the original prompts",
        "eta_before": "share of completions, 0 to 1: in a group whose outcomes differ",
        "eta_after": "share of completions, 0 to 1: in a group whose rewards differ, as it is trained on",
        "std": "reward: population std within a group, mean",
        "routed": "share of groups, 0 to 1: drawn again with sub-questions",
        "replaced": "tokens: of completions that were drawn again, the price of the step beyond rollout/tokens",
        "prefix": "share of sub-questions, 0 to 1: answered right up to the first mistake, mean over completions with them",
        "solved": "share of completions with sub-questions, 0 to 1: every sub-answer and the answer right",
        "useful": "share of steps, 0 to 1: S_u, mean over judged completions",
        **{label: "share of steps, 0 to 1: mean over judged completions" for label in LABELS[1:]},
        "steps": "steps: N, mean over judged completions",
        "zero": "share of right completions, 0 to 1: R = 0",
        "judge_failures": "share of right completions, 0 to 1: the judge had no answer",
    }

    @dataclass
    class Config:
        stage: Stage = Stage.schedule  # asr | qpr | schedule: asr up to `switch`, then qpr | mix: both from the start
        switch: int | None = None  # step from which a schedule is qpr; null: half of steps
        tau: float = 0.5  # rbar below which a group is drawn again, 0 to 1; 0: never
        beta: float = 0.5  # weight of the sub-answers, 0 to 1
        lambda_mechanical: float = 0.5  # penalties, each in [0, 1)
        lambda_redundant: float = 0.5
        lambda_reversion: float = 0.5
        lambda_error: float = 0.5
        alpha: float = 0.1  # of kappa, at least 0; 0: no length factor
        std_floor: float | None = None  # population std of a group below which its advantages shrink with it
        outcome: str | None = None  # reward that R takes the place of; null: eval.correct, or answer, numeric or math
        column: str = "scaffold"  # key of Prompt.extra: pairs [question, answer], or {question, answer}
        judge: Judges = Judges.rule  # rule: for task=arithmetic | endpoint
        url: str | None = None  # of the endpoint
        model: str | None = None  # of the endpoint
        timeout: float = 60.0  # seconds for one completion
        workers: int = 8  # completions judged at a time

        def __post_init__(self):
            for name in ("tau", "beta"):
                if not 0 <= getattr(self, name) <= 1:
                    raise ValueError(f"{name} lies in [0, 1], got {getattr(self, name)}")
            for label in LABELS[1:]:
                if not 0 <= getattr(self, f"lambda_{label}") < 1:
                    raise ValueError(f"lambda_{label} lies in [0, 1), got {getattr(self, f'lambda_{label}')}")
            if not self.alpha >= 0:
                raise ValueError(f"alpha is at least 0, got {self.alpha}")
            for name in ("std_floor", "timeout", "workers"):
                if getattr(self, name) is not None and not getattr(self, name) > 0:
                    raise ValueError(f"{name} is above 0, got {getattr(self, name)}")
            if self.switch is not None and (self.switch < 0 or self.stage is not Stage.schedule):
                raise ValueError("switch is a step, at least 0, of stage=schedule")
            other = {Stage.asr: Stage.qpr, Stage.qpr: Stage.asr}.get(self.stage)
            for name in READ.get(other, ()):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"{name} has no effect with stage={self.stage.name}: it belongs to {other.name}")
            endpoint = self.judge is Judges.endpoint
            if {self.url is not None, self.model is not None} != {endpoint}:
                raise ValueError("judge=endpoint needs url and model, and judge=rule has neither")
            if not endpoint and (self.timeout, self.workers) != (60.0, 8):
                raise ValueError("timeout and workers are for judge=endpoint")

    def __init__(self, config):
        super().__init__(config)
        self.judge = RuleJudge()
        if config.judge is Judges.endpoint:
            self.judge = EndpointJudge(config.url, config.model, config.timeout, config.workers)
        if config.std_floor is None:
            self.advantage = None  # no hook
        self.begun = False  # whether a schedule has come to QPR

    @hookimpl
    def validate(self, config, active):
        self.outcome(config, active.answering()["reward"])
        if self.config.stage is Stage.schedule and self.switch(config) >= config.steps:
            return f"{self.name}: the run ends after {config.steps} steps, before QPR begins at {self.switch(config)}"

    @hookimpl(wrapper=True)
    def transform_rewards(self, rollouts, rewards, run):
        rewards = yield
        if set(rollouts.tag) == {"eval"}:
            return rewards
        asr, qpr = self.stages(run)
        outcome = run.verdicts(rollouts, rewards)  # [R]
        asked = torch.tensor([asr and asks(prompt) for prompt in rollouts.prompts], dtype=torch.bool)  # [R]
        R = outcome.clone()
        for row in (asked & ~outcome.isnan()).nonzero()[:, 0].tolist():
            R[row] = self.prefix_reward(*self.read(rollouts.prompts[row], rollouts.text[row], bool(outcome[row])))
        if qpr:
            right = (outcome == 1) & ~asked & ~rewards.total.isnan()
            R = self.quality(rollouts, right, run).where(right, R)
        w = self.weight(rewards, run)
        return replace(rewards, total=rewards.total + w * (R - outcome).nan_to_num(0.0))

    @hookimpl(wrapper=True)
    def resample(self, rollouts, rewards, run):
        rollouts, rewards = yield
        asr, qpr = self.stages(run)
        self.begun = self.begun or (qpr and not asr)
        outcome = run.verdicts(rollouts, rewards)  # [R]
        self.log("stage", (asr + 2 * qpr) / (asr + qpr))
        self.log("accuracy", outcome[~outcome.isnan()].mean(), int((~outcome.isnan()).sum()))
        self.log("eta_before", 1 - group_equal(outcome, rollouts.group_id).double().mean())
        if asr:
            rollouts, rewards = self.reroute(rollouts, rewards, group_mean(outcome, rollouts.group_id), run)
        self.log("eta_after", 1 - group_equal(rewards.total, rollouts.group_id).double().mean())
        self.log("std", group_std(rewards.total, rollouts.group_id, 0).nan_to_num(0.0).mean())
        return rollouts, rewards

    @hookimpl(wrapper=True)
    def advantage(self, rollouts, rewards):
        A = yield
        std = group_std(rewards.total, rollouts.group_id, 0).nan_to_num(0.0)  # [R]
        scale = (std / self.config.std_floor).clamp(max=1.0)
        return A * (scale if A.ndim == 1 else scale[:, None])

    def stages(self, run):
        """(whether groups are drawn again, whether right completions are judged)."""
        stage = self.config.stage
        if stage is Stage.schedule:
            stage = Stage.qpr if self.begun or run.step >= self.switch(run.config) else Stage.asr
        return stage is not Stage.qpr, stage is not Stage.asr

    def switch(self, config):
        return config.steps // 2 if self.config.switch is None else self.config.switch

    def reroute(self, rollouts, rewards, rbar, run):
        """The rows with every routed group replaced, in their old places."""
        rows = {}  # group -> its rows
        for row, group in enumerate(rollouts.group_id.tolist()):
            rows.setdefault(group, []).append(row)
        first = {group: rollouts.prompts[own[0]] for group, own in rows.items()}
        chains = {group: [] if asks(p) else read_chain(p, self.config.column) for group, p in first.items()}
        if not (any(chains.values()) or any(map(asks, first.values()))):
            run.say(
                f"{self.name}: no prompt of step {run.step + 1} has sub-questions under extra[{self.config.column!r}]"
            )
        requests, old = [], []
        for group, own in rows.items():
            if not (chains[group] and float(rbar[own[0]]) < self.config.tau):
                continue
            prompt = scaffolded(first[group], chains[group])
            if len(run.policy.encode(prompt)) <= run.config.max_prompt_length:
                samples = tuple(rollouts.sample_id[own].tolist())
                requests.append(Request(prompt, group, samples, TAG, rollouts.policy[own[0]]))
                old += own
        self.log("routed", len(requests) / len(rows), len(rows))
        self.log("replaced", rollouts.lengths[old].sum())
        if not requests:
            return rollouts, rewards
        new = run.generate(requests)
        place = {row: len(rollouts) + at for at, row in enumerate(old)}
        order = [place.get(row, row) for row in range(len(rollouts))]
        pairs = (rollouts, new), (rewards, run.score(new))
        return tuple(concatenate(pair).select(order) for pair in pairs)

    def read(self, prompt, text, right):
        """Of a completion with sub-answers: (which of them are right, whether the answer is)."""
        main = main_answer(prompt, text)
        ok = correct_steps(prompt, read_chain(prompt, self.config.column), text)
        return ok, right or (main is not None and same(main, prompt.answer or ""))

    def prefix_reward(self, ok, right):
        """beta L / m + (1 - beta) Pi_m 1[right]."""
        L, m = [*ok, False].index(False), len(ok)  # L = sum_i Pi_i
        solved = all(ok) and right
        self.log("prefix", L / m)
        self.log("solved", solved)
        return self.config.beta * (L / m) + (1 - self.config.beta) * solved

    def quality(self, rollouts, right, run):
        """[R] float64: R of the right completions, judged by all processes together; 0 elsewhere."""
        rows = right.nonzero()[:, 0].tolist()
        mine = rows[run.rank :: run.world]
        answers = self.judge.labels([(rollouts.prompts[row], rollouts.text[row]) for row in mine])
        labels = dict(run.gather(list(zip(mine, answers, strict=True))))
        R = torch.full(right.shape, math.nan, dtype=torch.float64)
        for row in rows:
            if labels[row]:
                R[row] = self.step_reward(labels[row])
        failed = right & R.isnan()
        R = R.where(~failed, group_mean(R, rollouts.group_id).nan_to_num(0.5))
        if rows:
            self.log("judge_failures", failed.sum() / len(rows), len(rows))
            self.log("zero", (R[right] == 0).double().mean(), len(rows))
            if bool(failed.sum() == len(rows)):
                run.say(f"{self.name}: the judge has no answer to any of {len(rows)} completions; {self.judge.trouble}")
        return R.masked_fill(~right, 0.0)

    def step_reward(self, labels):
        """S_u Phi kappa of one completion."""
        c, N = self.config, len(labels)
        r = {label: labels.count(label) / N for label in LABELS}
        Phi = (1 - c.lambda_mechanical * r["mechanical"]) * (1 - c.lambda_redundant * r["redundant"])
        Phi *= (1 - c.lambda_reversion * r["reversion"]) * (1 - c.lambda_error * r["error"])
        for name, value in {**r, "steps": N}.items():
            self.log(name, value)
        return r["useful"] * Phi / (1 + c.alpha * math.log(N + 1))

    def weight(self, rewards, run):
        """Of the outcome in the total."""
        known = rewards.components
        name = self.outcome(run.config, known)
        if name is not None and name not in known:
            raise unknown(f"reward in plugins.{self.name}.outcome or eval.correct", name, known)
        return 1.0 if name is None else rewards.weights[name]

    def outcome(self, config, known):
        """Which of the rewards says what is right; None where there is none."""
        if named := self.config.outcome or config.eval.correct:
            return named
        names = [name for name in OUTCOMES if name in known] or list(known)
        if len(names) > 1:
            raise UserError(
                f"{self.name}: which reward says what is right, of {', '.join(names)}? set plugins.{self.name}.outcome=NAME"
            )
        return names[0] if names else None

    def state_dict(self):
        return {"begun": self.begun}

    def load_state_dict(self, state):
        self.begun = state.get("begun", False)
