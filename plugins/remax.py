"""ReMax: the reward of the greedy completion as the baseline (arXiv:2310.10505).

    A_i = r_i - r(greedy completion of the same prompt, by the policy that sampled)

One more rollout per group, with the tag of this plugin, scored like the others and not trained on. The baseline does
not depend on the samples: it is unbiased for one completion per prompt as for coupled ones. So equal rewards do not
mean advantage 0: a whole group may be better or worse than greedy. A row without a reward leaves its group; where the
greedy completion has no reward the whole group has advantage 0. Rewards of single tokens (a KL penalty) are in r_i and
not in the baseline. It reads rewards and stacks on any loss, weight and aggregation.
"""

from grpozoo import Plugin, Request, group_index, hookimpl


class Remax(Plugin):
    """`algo=remax`."""

    metrics = {
        "greedy_reward": "reward: mean of the greedy completions, the baselines",
        "greedy_tokens": "tokens per step: length of all greedy completions, the price of the baseline",
    }

    @hookimpl
    def advantage(self, rollouts, rewards, run):
        index, groups = group_index(rollouts.group_id)  # [R]
        places = index.tolist()
        firsts = [places.index(group) for group in range(groups)]  # any row of a group knows its prompt
        greedy = run.generate(
            [Request(rollouts.prompts[row], int(rollouts.group_id[row]), (0,), tag=self.name) for row in firsts],
            temperature=0.0,
        )
        baseline = run.score(greedy).total  # [groups] float64, in the order of the requests
        answered = baseline[~baseline.isnan()]
        self.log("greedy_reward", answered.mean() if len(answered) else 0.0, len(answered))
        self.log("greedy_tokens", greedy.lengths.sum())
        return (rewards.total - baseline[index]).nan_to_num(0.0)  # [R]
