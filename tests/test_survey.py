"""All prompts before the first step: counted as they will be encoded, refused together, and quickly."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import DATA, TOKENIZERS, words

from grpozoo import Prompt, UserError, models
from grpozoo.config import Config
from grpozoo.models.lengths import longer, most_tokens
from grpozoo.models.text import shown
from grpozoo.run import survey

POSITIONS = 1024  # of the tiny policy


def run_of(train, heldout=(), tokenizer=None, special=False, held=POSITIONS, **options):
    """What the survey asks of a run; `said` collects what it says."""
    shape = SimpleNamespace(max_position_embeddings=held)
    shape.get_text_config = lambda: shape
    policy = SimpleNamespace(
        tokenizer=tokenizer or models.tiny_tokenizer(),
        chat_template=None,
        special_tokens_in_data=special,
        model=SimpleNamespace(config=shape),
    )
    said = []
    config = replace(Config(task={}, plugins={}), **options)
    return SimpleNamespace(
        policy=policy, config=config, task=SimpleNamespace(train=train, heldout=heldout), say=said.append, said=said
    )


def texts(*found):
    return [Prompt(f"p{i}", text=text) for i, text in enumerate(found)]


@pytest.mark.parametrize("name", [*TOKENIZERS, "words with </s> appended"])
@settings(deadline=None)  # the first rendering tries the template out in a child
@given(data=st.lists(DATA, min_size=1, max_size=4), chat=st.booleans(), special=st.booleans(), limit=st.integers(0, 30))
def test_lengths_are_those_of_encoding_and_no_bound_is_below_them(name, data, chat, special, limit):
    tokenizer = TOKENIZERS.get(name) or words(eos=True)
    data = [text.replace("é", "e") + "e" for text in data]
    prompts = [Prompt(t, messages=({"role": "user", "content": t},)) if chat else Prompt(t, text=t) for t in data]
    exact = [(p, len(models.encode(tokenizer, p, special_tokens_in_data=special))) for p in prompts]
    found = list(longer(tokenizer, prompts, limit, special_tokens_in_data=special))
    assert sorted(map(str, found)) == sorted(str(pair) for pair in exact if pair[1] > limit)
    if special:
        assert all(most_tokens(tokenizer, shown(tokenizer, p, None)) >= tokens for p, tokens in exact)


def test_prompts_that_are_too_long_are_counted_with_the_limit_that_would_fit():
    run = run_of(texts("1" * 40, *["1" * 9] * 3, "1" * 30, "1" * 31, "1" * 32), texts("1" * 55), max_prompt_length=29)
    with pytest.raises(UserError) as caught:
        survey.check_prompts(run)
    first, second = str(caught.value).splitlines()
    assert first == (
        "5 of 8 prompts ('p0', 'p4', 'p5', ...) do not fit, the longest has 55 tokens: max_prompt_length is 29"
    )
    assert second.startswith("set max_prompt_length=55,")
    survey.check_prompts(run_of(run.task.train, run.task.heldout, max_prompt_length=55))


def test_only_the_held_out_prompts_that_are_evaluated_count():
    run = run_of(texts("1"), texts("1", "1" * 30), max_prompt_length=29)
    run.config.eval.prompts = 1
    survey.check_prompts(run)
    run.config.eval.prompts = 0
    with pytest.raises(UserError, match="1 of 3 prompts"):
        survey.check_prompts(run)


@pytest.mark.parametrize("length, fits", [(POSITIONS - 9, True), (POSITIONS - 8, False), (5000, False)])
def test_prompt_and_completion_stand_in_the_models_positions(length, fits):
    run = run_of(texts("1" * 9, "12"), max_completion_length=length)
    if fits:
        return survey.check_prompts(run)
    with pytest.raises(
        UserError, match=f"(?s)more than the 1024 positions.*max_completion_length={POSITIONS - 9} or less"
    ):
        survey.check_prompts(run)
    survey.check_prompts(run_of(run.task.train, held=None, max_completion_length=length))


def test_characters_that_the_tiny_policy_lacks_are_found_before_the_first_evaluation():
    with pytest.raises(
        UserError, match=r"2 of 3 prompts \('p0', 'p0'\) have characters .*: 'é', 'ü'\nit knows printable"
    ):
        survey.check_prompts(run_of(texts("café", "cafe"), texts("über")))


def test_special_tokens_in_data_are_said_once_and_not_if_they_are_allowed():
    run = run_of(texts("1<eos>2", "1", "<eos>"))
    survey.check_prompts(run)
    [notice] = run.said
    assert notice.startswith("2 of 3 prompts hold special tokens of the tokenizer, such as '<eos>'")
    allowed = run_of(texts("1<eos>2"), special=True)
    survey.check_prompts(allowed)
    assert not allowed.said


def test_of_a_streaming_set_no_more_is_read_than_its_buffer():
    read = []

    class Stream:
        def __iter__(self):
            return (read.append(i) or Prompt(str(i), text="1") for i in range(10**9))

    survey.check_prompts(run_of(Stream()))
    assert len(read) == survey.BUFFER


def test_short_prompts_are_let_pass_without_being_encoded(monkeypatch):
    monkeypatch.setattr("grpozoo.models.lengths._counts", lambda *_: pytest.fail("encoded"))
    start = time.process_time()
    survey.check_prompts(run_of([Prompt(str(i), text=f"{i}+35+48=") for i in range(20_000)]))
    assert time.process_time() - start < 2  # about 0.1


def test_no_more_than_100000_training_prompts_are_looked_at():
    class Long(list):
        def __len__(self):
            return 10**9

        def __iter__(self):
            return (Prompt(str(i), text="1" if i < survey.MOST else "é") for i in range(survey.MOST + 1))

    survey.check_prompts(run_of(Long()))
