"""Judges: the rules for arithmetic, what is remembered, retried and counted, and an endpoint that misbehaves."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpozoo import Prompt
from grpozoo.rewards.judge import LABELS, EndpointJudge, Judge, RuleJudge
from grpozoo.tasks.arithmetic import ALPHABET, LEVELS, Arithmetic

PROMPT = Prompt("p", text="((7+5)*3-4)*2=", extra={"expression": "((7+5)*3-4)*2", "modulus": 0})
MOD10 = Prompt("q", text="((7+5)*3-4)*2=", extra={"expression": "((7+5)*3-4)*2", "modulus": 10})
SUM = Prompt("s", text="12+35+48=", extra={"expression": "12+35+48", "modulus": 0})
TWICE = Prompt("t", text="4+2-2+2=", extra={"expression": "4+2-2+2", "modulus": 0})
U, M, D, V, E = LABELS


@pytest.mark.parametrize(
    "prompt, completion, labels",
    [
        (PROMPT, "7+5=12;12*3=36;36-4=32;32*2=64#64", [U, U, U, U]),
        (PROMPT, "7+5=12;12*3=35;35-4=31#31", [U, E, U]),  # a wrong value that is carried on
        (PROMPT, "7+5=12;7+5=12;12*3=36#36", [U, D, U]),
        (PROMPT, "7+5=12;12=12;12*3=36;36=36#36", [U, M, U, M]),
        (PROMPT, "7=7;7+5=12#12", [M, U]),
        (PROMPT, "7+5=12;12=12;12=12#1", [U, M, D]),  # identical to an earlier line comes first
        (PROMPT, "7+5=13;7+5=13#1", [E, E]),  # and false before that
        (PROMPT, "7+5=12;12*3=36;12*4=48;48-4=44#44", [U, U, V, U]),  # restarts from 12, which was used
        (PROMPT, "7+5=12;12*3=36;12=12#1", [U, U, V]),
        (PROMPT, "7+5=12;wait 12*3=36#1", [U, V]),
        (PROMPT, "7+5=12;wait;12*3=36#1", [U, V, U]),
        (PROMPT, "7+5=12;wait 12*3=35#1", [U, E]),
        (PROMPT, "so;7+5=12;12*3=36=36;12*3#1", [M, U, E, E]),
        (MOD10, "7+5=2;2*3=6;6-4=2;2*2=4#4", [U, U, U, U]),  # 2 is a result twice and an operand
        (MOD10, "7+5=12#2", [E]),  # the modulus counts
        (SUM, "12+35=47;47+0=47;47+48=95#95", [U, M, U]),
        (SUM, "12 + 35 = 47\n47 + 48 = 95\n#95", [U, U]),
        (SUM, "12+35+48=95#95", [U]),
        (SUM, "S1:12+35=47;47+48=95#95", [U, U]),  # in a slot
        (SUM, "#95", []),
        (TWICE, "4+2=6;6-2=4;4+2=6#6", [U, U, U]),  # equal lines, both needed
        (TWICE, "4+2=6;4+2=6;6-2=4#4", [U, D, U]),
        (TWICE, "4+2=6;6-2=4;6=6;6-2=4;4+2=6#6", [U, U, V, D, U]),  # 6=6 makes no second 6
        (SUM, "", []),
    ],
)
def test_the_rules(prompt, completion, labels):
    assert RuleJudge().label(prompt, completion) == labels


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, {"modulus": 10}, {"parentheses": False, "operators": "+-*", "terms": 5}])
def test_worked_solutions_are_all_useful_and_padding_is_not(level, options):
    task = Arithmetic(Arithmetic.Config(level=level, train=200, heldout=1, **options))
    padded = Arithmetic(Arithmetic.Config(level=level, train=200, heldout=1, padding=0.4, **options))
    shares, ambiguous = Counter(), 0
    for plain, prompt in zip(task.train, padded.train, strict=True):
        assert set(RuleJudge().label(plain, task.solution(plain))) == {U}
        labels = RuleJudge().label(prompt, padded.solution(prompt))
        assert padded.verify(prompt, padded.solution(prompt)) == 1.0
        ambiguous += labels.count(U) != len(prompt.extra["steps"])  # a copy may use equal operands that are left
        assert E not in labels
        shares.update(labels)
    assert 0.25 < 1 - shares[U] / shares.total() < 0.55  # .4 of at least 200 lines, four standard errors with ties
    assert ambiguous <= 2 and ({D, M, V} <= set(shares) or level == 1)


@given(st.text(alphabet=ALPHABET + " \nwaitundo", max_size=60))
def test_no_completion_makes_the_rules_raise(text):
    assert set(RuleJudge().label(PROMPT, text)) <= set(LABELS)


class Noted(Judge):
    """Fails as planned for a text: how often before it answers."""

    def __init__(self, failures=None, workers=1):
        super().__init__(workers)
        self.failures, self.calls, self.lock = dict(failures or {}), Counter(), threading.Lock()

    def label(self, prompt, completion):
        with self.lock:
            self.calls[completion] += 1
            left = self.failures.get(completion, 0)
            self.failures[completion] = left - 1
        if left > 0:
            raise OSError("no line")
        return {"none": [], "odd": ["good"]}.get(completion, [U, D])


@pytest.mark.parametrize("workers", [1, 4])
def test_equal_texts_are_asked_once_and_remembered(workers):
    judge = Noted(workers=workers)
    pairs = [(SUM, "a"), (SUM, "b"), (SUM, "a"), (PROMPT, "a")]
    assert judge.labels(pairs) == [[U, D]] * 4
    assert judge.calls == {"a": 2, "b": 1}  # "a" is an answer to two prompts
    assert judge.labels(pairs[::-1]) == [[U, D]] * 4 and judge.calls.total() == 3
    assert judge.labels([]) == []


def test_a_failure_is_retried_once_never_an_opinion_and_not_remembered():
    judge = Noted({"once": 1, "twice": 2})
    assert judge.labels([(SUM, "once"), (SUM, "twice"), (SUM, "fine")]) == [[U, D], None, [U, D]]
    assert judge.calls == {"once": 2, "twice": 2, "fine": 1} and "no line" in judge.trouble
    assert judge.labels([(SUM, "twice")]) == [[U, D]] and judge.calls["twice"] == 3


@pytest.mark.parametrize("text, said", [("none", "no step"), ("odd", "labels are useful")])
def test_no_step_and_unknown_labels_are_failures(text, said):
    judge = Noted()
    assert judge.labels([(SUM, text)]) == [None] and judge.calls[text] == 2 and said in judge.trouble


def test_the_rules_have_no_answer_outside_arithmetic():
    judge = RuleJudge()
    assert judge.labels([(Prompt("x", text="hello"), "1+1=2")]) == [None] and "arithmetic" in judge.trouble


def test_only_the_newest_answers_are_kept(monkeypatch):
    monkeypatch.setattr("grpozoo.rewards.judge.REMEMBERED", 2)
    judge = Noted()
    judge.labels([(SUM, "a"), (SUM, "b"), (SUM, "c")])
    judge.labels([(SUM, "b"), (SUM, "c")])
    assert judge.calls == {"a": 1, "b": 1, "c": 1}
    assert judge.labels([(SUM, "a")]) == [[U, D]] and judge.calls["a"] == 2


@contextmanager
def serving(answers):
    """A server whose chat completions answer with the given (status, content), the last one again and again."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            seen.append((self.path, dict(self.headers), body))
            status, content = answers.pop(0) if len(answers) > 1 else answers[0]
            if callable(content):
                content = content(body)
            self.send_response(status)
            if status in (301, 302, 303, 307, 308):
                self.send_header("Location", content)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": content}}]}).encode())

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("GRPOZOO_JUDGE_KEY", raising=False)


def test_an_endpoint_is_asked_with_problem_and_solution(monkeypatch):
    monkeypatch.setenv("GRPOZOO_JUDGE_KEY", "word")
    with serving([(200, 'Of course:\n["useful", " Redundant", "error"]')]) as (url, seen):
        assert EndpointJudge(url, "grader").labels([(SUM, "12+35=47;...")]) == [[U, D, E]]
        EndpointJudge(url + "/chat/completions/", "grader").labels([(SUM, "12+35=47;...")])
    (path, headers, body), (again, _, _) = seen
    assert path == again == "/v1/chat/completions" and headers["Authorization"] == "Bearer word"
    assert body["model"] == "grader" and body["temperature"] == 0
    content = body["messages"][0]["content"]
    assert "12+35+48=" in content and "12+35=47;..." in content and all(f"{label}: " in content for label in LABELS)


def test_an_endpoint_never_sees_the_answer_or_other_fields_of_the_prompt():
    """It sees what the model saw and wrote: no gold answer, no sub-answers, no rubric."""
    hidden = {"scaffold": [("SECRET-Q", "SECRET-A")], "values": ["SECRET"], "rubric": "SECRET"}
    text = Prompt("p", text="12+35+48=", answer="SECRET", extra=hidden)
    chat = Prompt("c", messages=({"role": "user", "content": "What is 12+35+48?"},), answer="SECRET", extra=hidden)
    with serving([(200, '["useful"]')]) as (url, seen):
        assert EndpointJudge(url, "grader").labels([(text, "12+35=47"), (chat, "12+35=47")]) == [[U], [U]]
    assert len(seen) == 2 and not any("SECRET" in json.dumps(request) for request in seen)


def test_answers_of_an_endpoint_belong_to_their_texts_whatever_the_order():
    def content(body):
        solution = body["messages"][0]["content"].rpartition("SOLUTION:\n")[2]
        return json.dumps([U] * int(solution))

    with serving([(200, content)]) as (url, seen):
        judge = EndpointJudge(url, "grader", workers=4)
        assert judge.labels([(SUM, str(n)) for n in (5, 1, 3, 5, 2)]) == [[U] * n for n in (5, 1, 3, 5, 2)]
    assert len(seen) == 4 and "Authorization" not in seen[0][1]


@pytest.mark.parametrize("bad", [(500, ""), (200, "I like it"), (200, "[1, 2]"), (200, '["useful"'), (200, None)])
def test_an_endpoint_that_fails_once_is_asked_again(bad):
    with serving([bad, (200, '["useful"]')]) as (url, seen):
        assert EndpointJudge(url, "grader").labels([(SUM, "x")]) == [[U]] and len(seen) == 2
    with serving([bad]) as (url, seen):
        assert EndpointJudge(url, "grader").labels([(SUM, "x")]) == [None] and len(seen) == 2


def test_an_endpoint_that_is_not_there_or_hangs_is_a_failure():
    with serving([(200, '["useful"]')]) as (url, _):
        pass  # the server is gone
    judge = EndpointJudge(url, "grader")
    assert judge.labels([(SUM, "x")]) == [None] and "URLError" in judge.trouble
    release = threading.Event()

    def content(body):
        release.wait(5)
        return '["useful"]'

    with serving([(200, content)]) as (url, _):
        judge = EndpointJudge(url, "grader", timeout=0.1)
        assert judge.labels([(SUM, "x")]) == [None] and "timed out" in judge.trouble
        release.set()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirect(monkeypatch, status):
    monkeypatch.setenv("GRPOZOO_JUDGE_KEY", "secret")
    with serving([(200, '["useful"]')]) as (other, seen), serving([(status, other)]) as (url, asked):
        judge = EndpointJudge(url, "grader")
        assert judge.labels([(SUM, "x")]) == [None] and len(asked) == 2
    assert not seen and f"redirects to {other}" in judge.trouble and "secret" not in judge.trouble
