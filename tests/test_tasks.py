"""Tasks on the user's own data and on reasoning-gym: columns, splits, ids, verifiers, messages for mistakes."""

import builtins
import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpozoo import UserError
from grpozoo.compose.task import load_task
from grpozoo.tasks.rows import extract

ROWS = [{"question": f"{i} + 1?", "answer": i + 1, "topic": "sums"} for i in range(200)]


def write(path, rows):
    """Rows in the format that the suffix names."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        comma = "," if path.suffix == ".csv" else "\t"
        lines = [comma.join(rows[0]), *(comma.join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def files(tmp_path, rows=ROWS, name="data.jsonl", **options):
    return load_task({"kind": "jsonl", "path": write(tmp_path / name, rows), **options})


def questions(prompts):
    return [prompt.text or prompt.messages[-1]["content"] for prompt in prompts]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_prompts_and_the_same_split(tmp_path, suffix):
    expected = files(tmp_path)
    task = files(tmp_path, name=f"other.{suffix}")
    assert questions(task.train) == questions(expected.train)
    assert questions(task.heldout) == questions(expected.heldout)
    assert task.train[0].answer == expected.train[0].answer
    assert task.train[0].extra == {"topic": "sums"}


def test_a_folder_and_a_pattern_read_all_their_files_in_order(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[100:])
    write(tmp_path / "a.csv", ROWS[:100])
    (tmp_path / "notes.md").write_text("not data")
    everything = load_task({"kind": "jsonl", "path": str(tmp_path), "heldout": 0})
    assert questions(everything.train) == [row["question"] for row in ROWS]
    some = load_task({"kind": "jsonl", "path": str(tmp_path / "*.csv"), "heldout": 0})
    assert len(some.train) == 100


def test_share_and_count_of_held_out_rows(tmp_path):
    assert len(files(tmp_path, heldout=25).heldout) == 25
    assert len(files(tmp_path, heldout=0).heldout) == 0
    tenth = files(tmp_path, heldout=0.1)
    assert len(tenth.train) + len(tenth.heldout) == 200
    assert abs(len(tenth.heldout) - 20) < 4 * (200 * 0.1 * 0.9) ** 0.5  # four standard deviations
    fifth = set(questions(files(tmp_path, heldout=0.2).heldout))
    assert set(questions(tenth.heldout)) < fifth
    with pytest.raises(UserError, match="whole number of rows, got 2.5"):
        files(tmp_path, heldout=2.5)


def test_ids_and_sides_survive_reordering_and_new_rows(tmp_path):
    before = files(tmp_path)
    after = files(tmp_path, [{"question": "new?", "answer": 1, "topic": "x"}, *reversed(ROWS)])
    for side in ("train", "heldout"):
        old, new = ({p.id for p in getattr(t, side)} for t in (before, after))
        assert old <= new and len(new - old) <= 1


def test_equal_rows_are_kept_on_one_side_with_ids_of_their_own(tmp_path):
    task = files(tmp_path, [row for row in ROWS for _ in range(3)], heldout=30)
    assert len(task.train) + len(task.heldout) == 600
    assert len({p.id for p in [*task.train, *task.heldout]}) == 600
    assert not set(questions(task.train)) & set(questions(task.heldout))
    assert len(task.heldout) == 30


def test_equal_questions_with_different_answers_are_on_one_side(tmp_path):
    task = files(tmp_path, [{**row, "answer": answer} for row in ROWS for answer in "ab"], heldout=0.5)
    assert not set(questions(task.train)) & set(questions(task.heldout))


def test_held_out_files_take_their_questions_out_of_training(tmp_path):
    path = write(tmp_path / "test.csv", ROWS[:20])
    task = files(tmp_path, heldout_path=path)
    assert questions(task.heldout) == questions(files(tmp_path, ROWS[:20], "x.jsonl", heldout=0).train)
    assert questions(task.train) == [row["question"] for row in ROWS[20:]]


def test_the_verifier_compares_what_follows_the_mark(tmp_path):
    rows = [{"question": "q", "answer": "long story #### 42 "}, {"question": "p", "answer": None}]
    task = files(tmp_path, rows, answer_after="####", heldout=0)
    marked, without = task.train
    assert marked.answer == "42"
    scores = [
        task.verify(marked, text)
        for text in ("so #### 42", "#### 41 #### 42\n", "42", "#### 42.", "#### 42 #### 41", "")
    ]
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert task.verify(without, "#### 42") is None  # no answer, no opinion
    plain = files(tmp_path, rows, heldout=0)
    assert plain.verify(plain.train[0], " long story #### 42") == 1.0


@pytest.mark.parametrize(
    "text, after, before, expected",
    [
        ("a <x> b </x> c", "<x>", "</x>", "b"),
        ("<x>a</x><x>b</x>", "<x>", "</x>", "b"),
        ("<x>a</x><x>b", "<x>", "</x>", None),
        ("a", "<x>", "</x>", None),
        ("a|b", None, "|", "a"),
        (" a ", None, None, "a"),
    ],
)
def test_extract_takes_the_last_closed_answer(text, after, before, expected):
    assert extract(text, after, before) == expected


def test_a_row_without_answer_column_has_no_verdict(tmp_path):
    task = files(tmp_path, [{"prompt": "hello"}], heldout=0)
    assert task.verify(task.train[0], "anything") is None
    assert task.train[0].answer is None and task.solution(task.train[0]) is None


def test_empty_cells_of_a_table_are_no_answer(tmp_path):
    task = files(tmp_path, [{"prompt": "a", "answer": ""}], "t.csv", heldout=0)
    assert task.verify(task.train[0], "") is None


def test_messages_are_found_and_a_closing_assistant_turn_is_the_solution_not_the_prompt(tmp_path):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    task = files(tmp_path, [{"messages": turns, "answer": "4", "prompt": "other", "k": 1}], "c.parquet", heldout=0)
    prompt = task.train[0]
    assert prompt.text is None and prompt.messages == ({"role": "user", "content": "2+2?"},)
    assert task.solution(prompt) == "4"
    assert prompt.extra == {"k": 1, "prompt": "other", "solution": "4"}
    nested = files(tmp_path, [{"prompt": turns, "answer": "4"}], heldout=0)  # a list in the column prompt
    assert nested.train[0].messages == prompt.messages


TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\n"}]


def test_a_dropped_assistant_turn_is_said_once_for_the_whole_set(tmp_path):
    task = files(tmp_path, [{"prompt": TURNS, "answer": "4"}, {"prompt": "3+3?", "answer": "6"}], heldout=0)
    [notice] = task.notices
    assert "1 of 2 rows end in an assistant turn" in notice and "task.prefill=continue" in notice
    assert not files(tmp_path, ROWS).notices


def test_a_prefilled_turn_is_gone_on_with_and_the_suffix_belongs_to_the_user(tmp_path):
    task = files(tmp_path, [{"prompt": TURNS, "answer": "4"}], prefill="continue", suffix=" Think.", heldout=0)
    [prompt] = task.train
    assert [m["content"] for m in prompt.messages] == ["2+2? Think.", "<think>\n"]
    assert task.solution(prompt) is None and not task.notices
    with pytest.raises(UserError, match="there is no prompt"):
        files(tmp_path, [{"prompt": TURNS[1:]}], prefill="continue")
    with pytest.raises(UserError, match="drop, continue"):
        files(tmp_path, [{"prompt": TURNS}], prefill="go_on")


def test_the_choice_of_prefill_is_part_of_the_fingerprint_and_its_default_is_what_there_was(tmp_path):
    base = files(tmp_path).fingerprint()
    assert files(tmp_path, prefill="drop").fingerprint() == base != files(tmp_path, prefill="continue").fingerprint()


def test_empty_answers_are_counted_and_named_by_row(tmp_path):
    rows = [{"prompt": str(i), "answer": None if i % 2 else i} for i in range(20)]
    [notice] = files(tmp_path, rows, heldout=0).notices
    assert "column 'answer' is empty in 10 of 20 rows (row 2, 4, 6, 8, 10, ...)" in notice
    assert not files(tmp_path, [{"prompt": "hello"}], heldout=0).notices  # nobody said that there are answers


def test_system_messages_suffix_and_chat(tmp_path):
    rows = [{"prompt": "hi", "system": "be brief"}, {"prompt": "ho", "system": None}]
    task = files(tmp_path, rows, system_prompt="be kind", suffix=" Think.", heldout=0)
    assert [[m["content"] for m in p.messages] for p in task.train] == [
        ["be brief", "hi Think."],
        ["be kind", "ho Think."],
    ]
    assert [p.text for p in files(tmp_path, rows[1:], suffix="!", heldout=0).train] == ["ho!"]
    assert files(tmp_path, rows[1:], chat=True, heldout=0).train[0].messages == ({"role": "user", "content": "ho"},)


def test_an_instruction_moves_no_row_to_the_other_side(tmp_path):
    def ids(task):
        return [p.id for p in task.heldout]

    assert ids(files(tmp_path)) == ids(files(tmp_path, suffix=" Think.", system_prompt="x"))


def test_the_fingerprint_covers_rows_and_options_but_not_the_place(tmp_path):
    base = files(tmp_path).fingerprint()
    assert files(tmp_path, name="moved.parquet").fingerprint() == base
    assert files(tmp_path, ROWS[:-1]).fingerprint() != base
    assert files(tmp_path, [*ROWS[:-1], {**ROWS[-1], "answer": 0}]).fingerprint() != base
    assert files(tmp_path, suffix="!").fingerprint() != base


@pytest.mark.parametrize(
    "rows, options, message",
    [
        (ROWS, {"answer": "anwser"}, "no column 'anwser', did you mean 'answer'\\?\ncolumns: question, answer, topic"),
        (ROWS, {"prompt": "quest"}, "no column 'quest', did you mean 'question'"),
        (ROWS, {"prompt": "question", "messages": "topic"}, "both name the prompt"),
        ([{"input": "x"}], {}, "no column for the prompt.*\ncolumns: input; name yours with task.prompt=COLUMN"),
        ([{"prompt": "x"}, {"prompt": " "}], {}, "row 2: column 'prompt' is empty"),
        ([{"prompt": None}], {}, "row 1: column 'prompt' is empty"),
        ([{"prompt": []}], {}, "row 1: column 'prompt' is empty"),
        ([{"prompt": 5}], {}, "row 1: column 'prompt' holds int"),
        ([{"prompt": [{"role": "bot", "content": "x"}]}], {}, "row 1: a message is"),
        ([{"prompt": [{"role": "assistant", "content": "x"}]}], {}, "there is no prompt"),
        ([], {}, "has no rows"),
        (ROWS, {"pormpt": "question"}, "has no option 'pormpt', did you mean 'prompt'"),
    ],
)
def test_mistakes_in_columns_are_told_with_what_is_there(tmp_path, rows, options, message):
    with pytest.raises(UserError, match=message):
        files(tmp_path, rows, **options)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", '["x"]\n', r"a.jsonl:1: a row is an object"),
        ("a.json", '[{"prompt": "x"}, 3]', r"item 2: a row is an object"),
        ("a.csv", "prompt,answer\nx\n", r"a.csv:2: the row does not have the 2 cells"),
        ("a.csv", "prompt,answer\nx,1,2\n", r"a.csv:2: the row does not have the 2 cells"),
        ("a.csv", "prompt,prompt\nx,1\n", r"two columns have one name"),
        ("a.csv", 'prompt\n"x"y\n', r"a.csv:2: not CSV"),
        ("a.csv", 'pro"mpt"\n"x"y\n', r"a.csv:2: not CSV"),
        ("a.parquet", "x", r"not Parquet"),
        ("a.txt", "x", r"a.txt: .txt is not a format that is read\nallowed: .jsonl"),
    ],
)
def test_broken_files_are_told_by_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_task({"kind": "jsonl", "path": str(tmp_path / name)})


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = {
    "deep JSON": (f'{{"prompt": {DEEP}}}', "a.{s}:1: JSON that is nested too deeply"),
    "deep lines": (f'{{"prompt": "x"}}\n{{"prompt": {DEEP}}}', "a.{s}:2: JSON that is nested too deeply"),
    "a giant number": ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", "a.{s}:1: not JSON: Exceeds the limit"),
    "a giant line": ("x" * 5_000_000, "a.{s}:1: not JSON"),
    "half a surrogate": ('{"prompt": "\\ud800"}', "row 1: column 'prompt' holds half of a surrogate pair"),
    "the same in a message": ('{"prompt": [{"role": "user", "content": "\\udc00"}]}', "half of a surrogate pair"),
    "a NUL byte": ('{"prompt": "x"}\n{"prompt": "x\0"}', "a.{s}:2: not text, it has a NUL byte"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "a.{s}:1: not text, it has a NUL byte.*UTF-16"),
    "Latin-1": ('{"prompt": "x"}\n{"prompt": "ü"}'.encode("latin-1"), "a.{s}:2: not UTF-8 text .byte 0xfc at place 13"),
    "gzip": (b"\x1f\x8b\x09junk", "a.{s}:1: not UTF-8 text .byte 0x8b at place 2"),
    "nothing": ("", "has no rows"),
    "blanks": (" \n \n", "has no rows"),
    "only a mark": (b"\xef\xbb\xbf", "has no rows"),
    "null": ("null", "a.{s}:1: a row is an object"),
    "many columns": (json.dumps({f"c{i}": 1 for i in range(10_000)}), "c19 and 9980 more; name yours"),
}


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json"])
@pytest.mark.parametrize("kind", BROKEN)
def test_every_kind_of_broken_text_is_one_short_sentence_with_its_place(tmp_path, kind, suffix):
    text, message = BROKEN[kind]
    (tmp_path / f"a.{suffix}").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message.format(s=suffix)) as caught:
        load_task({"kind": "jsonl", "path": str(tmp_path / f"a.{suffix}")})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("suffix, comma", [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("text, message", [
    ("prompt,answer\nx\0,1\n", "a.{s}:2: not text, it has a NUL byte"),
    ("prompt,answer\nx,ü\n".encode("latin-1"), "a.{s}:2: not UTF-8 text"),
    ("prompt,answer\nx,1\n\"y,1\n", "a.{s}:3: not CSV"),
    (",".join(["c"] * 100_000), "a.{s}: two columns have one name: 'c'"),
    (",".join(f"c{i}" for i in range(10_000)) + "\n" + ",".join("1" * 10_000), "9980 more; name yours"),
    ("prompt,answer\n", "has no rows"),
    ("\0" * 50, "a.{s}:1: not text"),
    ("prompt;answer\nx;1\n", "columns: prompt;answer"),
])  # fmt: skip
def test_every_kind_of_broken_table_is_one_short_sentence(tmp_path, suffix, comma, text, message):
    text = text if isinstance(text, bytes) else text.encode()
    (tmp_path / f"a.{suffix}").write_bytes(text.replace(b",", comma.encode()))
    with pytest.raises(UserError, match=message.format(s=suffix)) as caught:
        load_task({"kind": "jsonl", "path": str(tmp_path / f"a.{suffix}")})
    assert len(str(caught.value)) < 1000


def test_carriage_returns_alone_end_the_lines_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'prompt,answer\rx,1\r"a\r\nb",2\r')
    task = load_task({"kind": "jsonl", "path": str(tmp_path / "a.csv"), "heldout": 0})
    assert [(p.text, p.answer) for p in task.train] == [("x", "1"), ("a\r\nb", "2")]


@pytest.mark.parametrize("damage", [
    lambda b: b[: len(b) // 2], lambda b: b[:10] + b"x" * 50 + b[60:], lambda b: b[:-40] + b"\xff" * 28 + b[-12:],
    lambda b: b"", lambda b: b[:4], lambda b: b"\0" * 100,
])  # fmt: skip
def test_damaged_parquet_is_told_by_file(tmp_path, damage):
    path = Path(write(tmp_path / "a.parquet", ROWS))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"a\.parquet: not Parquet, or damaged: .") as caught:
        load_task({"kind": "jsonl", "path": str(path)})
    assert len(str(caught.value).splitlines()) == 1


def test_a_table_with_two_columns_of_one_name_is_refused_in_parquet_too(tmp_path):
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt"] * 2), tmp_path / "a.parquet"
    )
    with pytest.raises(UserError, match="two columns have one name: 'prompt'"):
        load_task({"kind": "jsonl", "path": str(tmp_path / "a.parquet")})


def test_a_missing_number_of_a_table_is_no_answer(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [1.0, float("nan")]}), tmp_path / "a.parquet")
    task = load_task({"kind": "jsonl", "path": str(tmp_path / "a.parquet"), "heldout": 0})
    assert [p.answer for p in task.train] == ["1.0", None] and "1 of 2 rows (row 2)" in task.notices[0]


@pytest.mark.parametrize("path", ["", "\0", "a" * 5000, "~nobody-of-this-name/a.jsonl", "[", "nowhere/*.csv"])
def test_paths_that_no_file_can_have_are_told(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "b.jsonl", ROWS)  # an empty path is not the working directory
    with pytest.raises(UserError, match=r"task\.path=.*\nallowed: a file, folder or pattern") as caught:
        load_task({"kind": "jsonl", "path": path})
    assert len(str(caught.value)) < 600


def test_a_folder_without_data_and_a_file_that_cannot_be_read_are_told(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UserError, match=r"a\.jsonl: the folder holds no such file"):
        load_task({"kind": "jsonl", "path": str(tmp_path / "a.jsonl")})
    path = write(tmp_path / "b.jsonl", ROWS)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(builtins, "open", refused)
    with pytest.raises(UserError, match=r"b\.jsonl cannot be read: Permission denied"):
        load_task({"kind": "jsonl", "path": path})


def test_rows_of_several_files_are_named_by_their_own_file(tmp_path):
    write(tmp_path / "a.jsonl", ROWS[:3])
    write(tmp_path / "b.jsonl", [ROWS[3], {"question": None}])
    with pytest.raises(UserError, match=r"b\.jsonl, row 2: column 'question' is empty"):
        load_task({"kind": "jsonl", "path": str(tmp_path)})


@pytest.mark.parametrize("option", ["answer_after", "answer_before"])
def test_an_empty_mark_is_refused(tmp_path, option):
    with pytest.raises(UserError, match="at least one character, or null"):
        files(tmp_path, **{option: ""})


def test_text_in_another_encoding_is_told_by_file(tmp_path):
    (tmp_path / "a.csv").write_bytes("prompt\nfünf\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.csv:2: not UTF-8 text \(byte 0xfc at place 2\)"):
        load_task({"kind": "jsonl", "path": str(tmp_path / "a.csv")})


def test_cells_of_a_csv_file_are_text_with_quotes_and_line_ends(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"two\nlines, ""quoted""",007\r\n')
    prompt = load_task({"kind": "jsonl", "path": str(tmp_path / "a.csv"), "heldout": 0}).train[0]
    assert (prompt.text, prompt.answer) == ('two\nlines, "quoted"', "007")


def hub(tmp_path, monkeypatch, rows=ROWS, test=None, **options):
    """A local folder in the layout of a hub data set."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir(exist_ok=True)
    write(folder / "train.parquet", rows)
    if test:
        write(folder / "test.parquet", test)
    return load_task({"kind": "hf", "path": str(folder), **options})


def test_a_data_set_folder_is_the_same_as_its_file(tmp_path, monkeypatch):
    task, expected = hub(tmp_path, monkeypatch), files(tmp_path)
    assert list(task.train) == list(expected.train)
    assert list(task.heldout) == list(expected.heldout)


def test_a_split_can_be_the_held_out_set(tmp_path, monkeypatch):
    for streaming in (False, True):
        task = hub(tmp_path, monkeypatch, test=ROWS[:20], heldout_split="test", streaming=streaming)
        assert questions(task.heldout) == [row["question"] for row in ROWS[:20]]
        assert questions(task.train) == [row["question"] for row in ROWS[20:]]


def test_a_stream_keeps_a_share_of_the_questions_for_the_held_out_set(tmp_path, monkeypatch):
    task = hub(tmp_path, monkeypatch, rows=ROWS * 2, streaming=True, heldout=0.2)
    assert not hasattr(task.train, "__len__")
    train, heldout = list(task.train), list(task.heldout)
    assert [p.id for p in train] == [p.id for p in task.train]  # the same each time
    assert len(train) + len(heldout) == len({p.id for p in train + heldout}) == 400
    assert questions(heldout) == questions(hub(tmp_path, monkeypatch, rows=ROWS * 2, heldout=0.2).heldout)
    first = hub(tmp_path, monkeypatch, rows=ROWS * 2, streaming=True, heldout=3)
    assert len(first.heldout) == 3
    assert not set(questions(first.train)) & set(questions(first.heldout))
    assert first.fingerprint() != task.fingerprint()
    assert task.fingerprint() == hub(tmp_path, monkeypatch, rows=ROWS * 2, streaming=True, heldout=0.2).fingerprint()


def test_a_data_set_that_does_not_load_says_why(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="split dev.*does not load: Unknown split"):
        hub(tmp_path, monkeypatch, split="dev")
    with pytest.raises(UserError, match="no column 'quest', did you mean 'question'"):
        hub(tmp_path, monkeypatch, prompt="quest")
    with pytest.raises(UserError, match="does not load"):
        load_task({"kind": "hf", "path": str(tmp_path / "nothing")})


@pytest.fixture
def gym(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("GRPOZOO_CACHE", str(tmp_path / "cache"))

    def make(name="chain_sum", **options):
        return load_task({"kind": "reasoning_gym", "name": name, "train": 40, "heldout": 8, **options})

    return make


@pytest.mark.parametrize("name", ["chain_sum", "number_sorting", "spell_backward", "countdown", "rearc"])
def test_a_generators_own_answer_is_right_and_another_is_not(gym, name):
    options = {} if name != "countdown" else {"train": 10, "heldout": 2}
    task = gym(name, **options)
    for prompt in [*task.train[:5], *task.heldout[:2]]:
        assert task.verify(prompt, f"<answer>wrong</answer> no, <answer> {prompt.answer} </answer>") == 1.0
        assert task.verify(prompt, "<answer>wrong</answer>") < 1.0
        assert task.verify(prompt, prompt.answer) == 0.0  # no marks
        assert prompt.messages[-1]["content"].endswith(task.config.suffix)


def test_generated_questions_are_distinct_and_split_by_their_text(gym):
    task, other = gym(), gym(train=60, heldout=20)
    asked = [p.extra["entry"]["question"] for p in [*task.train, *task.heldout]]
    assert len(set(asked)) == 48
    assert not {p.id for p in other.train} & {p.id for p in task.heldout}
    assert [p.id for p in other.train[:40]] == [p.id for p in task.train]
    assert {p.id for p in gym(seed=1).train} != {p.id for p in task.train}


def test_problems_come_from_the_cache_the_second_time(gym, monkeypatch):
    first = gym("list_functions")  # gives other problems in another order
    monkeypatch.setattr("grpozoo.tasks.gym.Gym._generate", lambda self: pytest.fail("generated again"))
    assert gym("list_functions").train == first.train
    assert gym("list_functions").fingerprint() == first.fingerprint()


def test_plain_prompts_and_whole_completions(gym):
    task = gym(chat=False, system="Compute. ", suffix="", answer_after=None, answer_before=None)
    prompt = task.train[0]
    assert prompt.messages is None
    assert prompt.text == "Compute. " + prompt.extra["entry"]["question"]
    assert task.verify(prompt, f" {prompt.answer}\n") == 1.0


def test_options_reach_the_generator(gym):
    task = gym(options={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2})
    assert {p.extra["entry"]["metadata"]["num_terms"] for p in task.train} == {2}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": "chain_some"}, "unknown reasoning-gym generator 'chain_some', did you mean 'chain_sum'"),
        ({"options": {"max_term": 3}}, "chain_sum has no option 'max_term', did you mean 'max_terms'"),
        ({"options": {"min_terms": 9, "max_terms": 3}}, "task.options: chain_sum refuses"),
        ({"options": {"seed": 3}}, "options.seed is set by task.seed"),
        (
            {"name": "coin_flip", "train": 10**4, "options": {"min_trials": 3, "max_trials": 3}},
            "coin_flip gave .* problems that differ",
        ),
    ],
)
def test_mistakes_about_generators_are_told(gym, options, message):
    with pytest.raises(UserError, match=message):
        gym(**options)


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **keywords):
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'grpozoo\[reasoning-gym\]'"):
        load_task({"kind": "reasoning_gym", "name": "chain_sum"})


def test_a_stream_is_read_no_further_than_asked(tmp_path, monkeypatch):
    task = hub(tmp_path, monkeypatch, streaming=True, heldout=2)
    read = []
    source = task.train.rows.source
    task.train.rows.source = (read.append(i) or row for i, row in enumerate(source))
    assert len(list(islice(task.train, 5))) == 5
    assert len(read) <= 10
