"""algo=entropy_mask: the worked batch, how many tokens train, and which."""

import pytest
import torch
from grpozoo_plugins.entropy_mask import EntropyMask, Normalizer
from hypothesis import given, settings
from hypothesis import strategies as st
from two_groups import DAPO, GRPO, TOKENS, places, two_groups

from grpozoo import Output, UserError
from grpozoo.testing import check_plugin, compose, fixture, loss
from grpozoo.testing.example import garble, select, widen

SEVEN = {(0, 2), (1, 3), (3, 0), (5, 1), (6, 3), (7, 0), (7, 2)}  # entropies from 0.95 up


def weights(step=None, **options):
    """The table of a step, and the plugin."""
    plugin = EntropyMask(EntropyMask.Config(**options))
    plugin.name = "entropy_mask"
    step = step or two_groups()
    out = Output(step.out.logprobs.detach(), step.out.entropy.detach())
    return plugin.minibatch(batch=step.batch, out=out)["entropy_mask/weights"], plugin


@pytest.mark.parametrize("normalizer", ["selected", "all"])
def test_conformance(normalizer):
    check_plugin("entropy_mask", "algo=entropy_mask", f"plugins.entropy_mask.normalizer={normalizer}")


@pytest.mark.parametrize("normalizer, expected", [("selected", 0.182884), ("all", 0.037653)])
def test_loss_of_the_worked_batch(normalizer, expected):
    """On DAPO's clip; 0.037653 * 34 / 7 = 0.182886, the last digit is rounding."""
    how = ("algo=entropy_mask", f"plugins.entropy_mask.normalizer={normalizer}", *DAPO)
    found, gradient = loss(*how, step=two_groups())
    assert found == pytest.approx(expected, abs=1e-6)
    _, plain = loss(*DAPO, step=two_groups())
    factor = TOKENS / 7 if normalizer == "selected" else 1.0
    S = torch.zeros_like(two_groups().batch.mask)
    S[tuple(zip(*SEVEN, strict=True))] = True
    assert not gradient[~S].any()
    torch.testing.assert_close(gradient[S], factor * plain[S], rtol=0, atol=1e-12)


def test_chosen_positions_of_the_worked_batch():
    """k = floor(34 * 0.2 + 0.9999) = 7."""
    found, plugin = weights()
    assert places(found) == SEVEN
    assert plugin.logged == [
        ("entropy_mask/selected", 7 / TOKENS, TOKENS),
        ("entropy_mask/threshold", pytest.approx(0.95), 1.0),
    ]


@pytest.mark.parametrize("normalizer", ["selected", "all"])
@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean", "const_len", "seq_sum", "token_sum"])
def test_share_one_is_grpo(normalizer, aggregation):
    how = (*GRPO, f"plugins.grpo.aggregation={aggregation}", "plugins.entropy_mask.share=1")
    found = loss("algo=entropy_mask", f"plugins.entropy_mask.normalizer={normalizer}", *how)
    plain = loss(*GRPO, f"plugins.grpo.aggregation={aggregation}")
    assert found[0] == plain[0]
    assert torch.equal(found[1], plain[1])


@given(st.floats(0, 1), st.sampled_from(list(Normalizer)))
@settings(max_examples=60, deadline=None)
def test_the_number_of_tokens_is_exact(share, normalizer):
    """Entropies of the worked example take five values only: ties are cut too."""
    step = fixture()
    found, _ = weights(step, share=share, normalizer=normalizer)
    S, N = found != 0, 27
    k = max(1, int(N * share + 0.9999))
    assert int(S.sum()) == k
    assert not (S & ~step.batch.mask).any()
    assert step.out.entropy[S].min() >= step.out.entropy[step.batch.mask & ~S].max() if k < N else True
    assert found.sum().item() == pytest.approx(N if normalizer is Normalizer.selected else k, abs=1e-9)


def test_ties_go_to_the_lowest_index():
    """F1 has entropy 0.6 at (0, 3) (1, 1) (3, 2) (4, 0) (5, 3) (6, 1) and the mask; the first is beyond its row's end."""
    step = fixture()
    tied = sorted(places(step.batch.mask & (step.out.entropy > 0.55)))
    found, _ = weights(step, share=3 / 27)
    assert sorted(places(found)) == tied[:3] == [(1, 1), (3, 2), (4, 0)]


@given(st.permutations(range(8)), st.integers(0, 3), st.sampled_from([float("nan"), float("inf"), 1e30, -1.0]))
@settings(max_examples=40, deadline=None)
def test_row_order_padding_and_masked_entropies_change_no_choice(order, columns, garbage):
    step = garble(widen(select(two_groups(), order), columns), garbage)
    assert {(order[row], token) for row, token in places(weights(step)[0])} == SEVEN


def test_one_position_at_least():
    assert places(weights(share=0.0)[0]) == {(5, 1)}  # 1.60


def test_it_is_refused_beside_stare():
    with pytest.raises(UserError, match="entropy_mask does not stack with stare: the mask would remove tokens"):
        compose("algo=entropy_mask", "+plugins.stare={}")


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_lies_between_0_and_1(share):
    with pytest.raises(ValueError, match=r"share lies in \[0, 1\]"):
        EntropyMask.Config(share=share)
