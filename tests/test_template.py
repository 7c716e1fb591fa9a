"""Chat templates are programs of strangers: what hangs, swells, raises or does not parse ends in one sentence."""

from types import SimpleNamespace

import pytest
from test_models import words

from grpozoo import Prompt, UserError, models
from grpozoo.config import Model
from grpozoo.models import template

CHAT = Prompt("p7", messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}))
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% endfor %}"
)


@pytest.fixture
def tight(monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 1)


@pytest.mark.parametrize("text, message", [
    ("{{ 'a' * 10**10 }}", "giant text"),
    ("{{ 'one ' * 10**7 }}", "giant text"),
    ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
     "does not end within 1 seconds"),
    ("{% for m in messages %}", "is not valid: .*endfor"),
])  # fmt: skip
def test_a_template_that_hangs_swells_or_does_not_parse_is_refused(tight, text, message):
    with pytest.raises(UserError, match=f"chat template .*{message}(.|\n)*model.chat_template=false"):
        models.encode(words(text), CHAT)
    assert models.encode(words(text), CHAT, chat_template=False)  # the way out works


def test_a_template_that_raises_names_the_prompt_and_what_it_said():
    tokenizer = words(NO_SYSTEM)
    with pytest.raises(
        UserError, match=r"'p7' \(roles: system, user\): System role not supported\n.*chat_template=false"
    ):
        models.encode(tokenizer, CHAT)
    assert models.encode(tokenizer, Prompt("q", messages=({"role": "user", "content": "one"},))) == [3]


def test_a_template_is_tried_out_once_and_gets_what_it_would_get(monkeypatch):
    calls = []
    real = template._child
    monkeypatch.setattr(template, "_child", lambda *arguments: calls.append(arguments) or real(*arguments))
    tokenizer = words(
        "{{ bos_token }}{% for m in messages %}{{ m.content | tojson | length }}{% endfor %}{{ eos_token }}"
    )
    for _ in range(2):
        models.encode(tokenizer, CHAT)
    assert len(calls) == 1 and real(*calls[0]) == {"length": len("<s>105</s>")}


def test_a_bad_template_is_found_before_the_weights_are_read(tmp_path, monkeypatch):
    models.save(models.tiny_model(Model(layers=1, width=16, heads=2)), models.tiny_tokenizer(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for")
    monkeypatch.setattr("grpozoo.models.loading.whole", None)
    with pytest.raises(UserError, match="chat template is not valid"):
        models.load(Model(path=str(tmp_path)), SimpleNamespace(train=[CHAT]))
