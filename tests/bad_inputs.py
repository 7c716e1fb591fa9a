"""Bad inputs besides options (tests/bad_options.py): the words of a command, data, models, runs, plugins and tasks.

A row is (name, words, message): the words may use {here}, the working directory, which `prepare` has filled before.
`late`: what only shows when a model is there.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = [  # random weights, one step
    "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "eval.every=0", "eval.prompts=4",
    "eval.samples=0", "steps=1", "prompts_per_step=2", "group_size=2", "max_completion_length=8", "logger.trackers=[]",
    "logger.progress=false", "checkpoint.every=0",
]  # fmt: skip
FEW = ["task.train=24", "task.heldout=8"]


@dataclass(frozen=True)
class Case:
    """One bad input, and a pattern of the sentence that it must get."""

    name: str
    words: tuple[str, ...]
    message: str
    prepare: Callable[[Path], Any] = lambda folder: None
    late: bool = False  # found when there is a model
    entry: tuple[str, str] | None = None  # group and name under which mine_of_them.py:Mine is installed


def put(name: str, content: str | bytes) -> Callable[[Path], Any]:
    """A function that writes a file into the working directory."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).parent.mkdir(parents=True, exist_ok=True) or (folder / name).write_bytes(data)


def rows(*some: dict[str, Any], times: int = 1) -> str:
    return "".join(json.dumps(row) + "\n" for _ in range(times) for row in some)


# --- the words of a command: (words, message)

WORDS = [
    ("+algo=gspo", r"algo is chosen already: write algo=gspo, without \+"),
    ("++algo=gspo", r"algo is chosen already"),
    ("~algo", r"~algo: a group is not switched off\nwrite algo=grpo"),
    ("~algo=grpo", "a group is not switched off"),
    ("~reward", "a group is not switched off"),
    ("algo@x=gspo", r"write algo=gspo, without @"),
    ("algo@plugins=gspo", "without @"),
    ("+algo@plugins.x=gspo", "without @"),
    ("algo=gspo algo=dapo", r"algo is chosen 2 times"),
    ("task=jsonl task=hf", "task is chosen 2 times"),
    ("algo=[gspo,gspo]", "names gspo twice"),
    ("algo=null", r"algo: a choice is a name"),
    ("algo=5", r"algo: a choice is a name"),
    ("algo=''", "algo"),
    ("algo={a:1}", "algo: a choice is a name"),
    ("algo=[[gspo]]", "algo: a choice is a name"),
    ("algo=stair", r"unknown choice algo=stair, did you mean 'stare'"),
    ("algo=../model/tiny", "algo"),
    ("algo=/etc/passwd", "algo"),
    ("model=gpt7", "unknown choice model=gpt7"),
    ("task=arithmetics", r"unknown choice task=arithmetics, did you mean 'arithmetic'"),
    ("optim=sgd", "unknown choice optim=sgd"),
    ("eval=none", "unknown choice eval=none"),
    ("experiment=mine", "experiment"),
    ("base=gspo", "unknown choice base=gspo"),
    ("=5", r"the argument '=5' has no key"),
    ("=", "the argument '=' has no key|cannot read"),
    ("+=5", "no key|cannot read"),
    ("~", "cannot read|no key"),
    ("steps", "cannot read the argument 'steps'"),
    ("steps==5", "steps"),
    ("steps=[1", "cannot read the argument"),
    ("steps={", "cannot read the argument"),
    ("steps='1", "cannot read the argument"),
    ("steps=1,2", "need the flag -m"),
    ("steps=range(1,3)", "need the flag -m"),
    ("steps=${lr}x", "cannot read|steps"),
    ("steps=${nothing}", "steps"),
    ("steps=${steps}", "steps"),
    ("steps=${oc.env:NOT_SET_ANYWHERE}", "steps"),
    ("steps=${nothing:1}", "steps"),
    ("task.path=a#b", "task.path"),
    ("task.answer_after=####", "takes quotes for Hydra and for the shell"),
    ("group_sise=4", r"unknown key 'group_sise', did you mean 'group_size'"),
    ("modle.kind=tiny", "unknown key 'modle.kind', did you mean 'model.kind'"),
    ("+nonsense=1", "unknown section 'nonsense'"),
    ("++nonsense.a=1", "unknown section 'nonsense'"),
    ("+seed=1", "seed is there already"),
    ("+update.epocs=1", "did you mean 'epochs'"),
    ("++update.epocs=1", "did you mean 'epochs'"),
    ("plugins.grpo.clipp=1", "did you mean 'clip'"),
    ("+plugins.stair={}", "unknown plugin 'stair'"),
    ("+plugins.gprpo=null", "did you mean 'grpo'"),
    ("plugins.gspo.clip=1", "plugins.gspo"),
    ("+plugins.gspo=5", "plugins.gspo is a section of options, got 5"),
    ("+plugins.gspo=[]", r"plugins.gspo is a section of options, got \[\]"),
    ("+plugins.5={}", "unknown plugin '5'"),
    ("~plugins", "plugins is a section, got null"),
    ("~plugins.gspo", "unknown key 'plugins.gspo'"),
    ("~plugins.iid", r"no plugin answers token_sampler\(\)"),
    ("~plugins.native", r"no plugin answers generate\(\)"),
    ("~plugins.answer", "no reward: choose one"),
    ("~steps=5", "steps"),
    ("~model", "a group is not switched off"),
    ("plugins=null", "plugins is a section, got null"),
    ("plugins=[]", r"plugins cannot be set to \[\]"),
    ("update=null", "update is a section, got null"),
    ("update=[1]", r"update cannot be set to \[1\]"),
    ("checkpoint=0", "checkpoint is a section, got 0"),
    ("sampling=text", "sampling is a section, got text"),
    ("sampling.top_p.x=1", "sampling.top_p"),
    ("steps.x=1", "steps"),
    ("task.kind=null", "task.kind has no value"),
    ("task.kind=5", "unknown task '5'"),
    ("task.kind=[a]", "unknown task"),
    ("~task.kind", "task.kind has no value"),
    ("task.level.x=3", "task.level"),
    ("order=[nobody]", "unknown plugin in order 'nobody'"),
    ("order=grpo", "order"),
    ("engine=[native,hf]", r"both replace generate\(\)"),
    ("sampler=[iid,qmc]", r"both replace token_sampler\(\)"),
    ("algo=[dapo,r1]", "plugins.grpo.clip=10.0 has no effect: clip_higher replaces"),
    ("reward=function", "plugins.function.path has no value"),
    ("seed=1e999", "seed"),
    ("seed=1_0_", "seed"),
    ("temperature=0", "temperature=0 is greedy"),
    ("temperature=1e-9", "rounding errors of float32"),
    ("temperature=1e30", "temperature is at most 100000"),
    ("eval.temperature=1e9", "eval.temperature is at most 100000"),
    ("optim.eps=1e30", r"optim.eps lies in \(0, 1\]"),
    ("group_size=1000000000", "prompts_per_step \\* group_size is at most"),
    ("prompts_per_step=1000000000", "prompts_per_step"),
    ("eval.samples=1000000000", "eval.samples is at most"),
    ("task=digit_sum task.max_sum=1000000000", "max_sum is at most 10000"),
    ("task=digit_sum task.variants=1000000000", "variants lies in"),
    ("task=digit_sum task.high=99", "low and high are digits"),
    ("task=reasoning_gym task.name=chain_sum task.train=1000000000", "train lies in 1..10000000"),
    ("task=reasoning_gym task.name=chain_sum task.heldout=1000000000", "heldout lies in 0..10000000"),
    ("task=reasoning_gym task.name=chain_sums", "did you mean 'chain_sum'"),
    ("task=reasoning_gym task.name=chain_sum +task.options.max_term=3", "did you mean 'max_terms'"),
    ("task=reasoning_gym task.name=chain_sum +task.options.max_terms=text", "chain_sum refuses|task.reasoning_gym"),
    ("task=reasoning_gym task.name=chain_sum +task.options.seed=3", "options.seed is set by task.seed"),
    ("task=arithmetic task.train=1000000000", "train lies in"),
    ("task=arithmetic task.operators=xyz", "operators are distinct characters"),
    ("task=arithmetic task.terms=99", "terms <= 32"),
    ("optim.betas=[0.9]", r"optim.betas are two numbers"),
    ("optim.betas=[0.9,1]", r"optim.betas are two numbers"),
    ("optim.betas=[]", r"optim.betas are two numbers"),
    ("eval.ks=[0]", r"eval.ks lie in"),
    ("eval.ks=[16]", r"eval.ks lie in"),
    ("model.dtype=float16", "float16 cannot be trained"),
    ("model.dtype=int8", "model.dtype is float32 or bfloat16"),
    ("model.kind=gpt2", "model.kind is tiny or smollm2"),
    ("model.width=30", "must be a multiple of model.heads"),
    ("model.width=100", "must be even"),
    ("model.chat_template=true", "the tiny policy has no chat template"),
    ("model=smollm2 model.layers=3", "shapes model=tiny only"),
    ("logger.trackers=[nobody]", "nobody"),
    ("logger.trackers=[5]", "5"),
    ("logger.project=../x", "logger.project is a name without /"),
    ("logger.project=''", "logger.project is a name"),
    ("update.mini_batches=100000", "optimizer steps cannot share"),
    ("prompts_per_step=1000", "the training set has 24 prompts"),
    ("optim.betas={a:1}", "optim.betas cannot be set to"),
    ("--nothing", "unknown flag --nothing"),
    ("--cfg", "expected one argument"),
    ("--cfg jobs", "invalid choice: 'jobs'"),
    ("-x", "unknown flag -x"),
    ("lr=1 -c", "expected one argument"),
    ("a" * 5000, "cannot read the argument"),
    ("steps=" + "9" * 5000, "cannot read the argument 'steps=999.*digits"),
    ("steps=" + "[" * 5000, "cannot read the argument"),
    ("lr=" + "x" * 100_000, "lr"),
]  # fmt: skip


# --- what options that are texts may say

OPTIONS = [
    ("reward=format plugins.format.pattern='['", "pattern"),
    ("reward=format plugins.format.pattern='(?P<a'", "pattern"),
    ("algo=token_class plugins.token_class.pattern='*'", "pattern"),
    ("params=top plugins.layers.profile=nowhere.json", "profile"),
    ("params=lora plugins.lora.targets=[]", "targets"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint", "judge=endpoint needs url and model"),
    ("algo=scope_rl plugins.scope_rl.url=http://x plugins.scope_rl.model=y", "judge=rule has neither"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint plugins.scope_rl.model=y plugins.scope_rl.url='http://me:word@host/v1'", "holds a password"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint plugins.scope_rl.model=y plugins.scope_rl.url=nonsense", "url"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint plugins.scope_rl.model=y plugins.scope_rl.url='file:///etc/passwd'", "url"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint plugins.scope_rl.model=y plugins.scope_rl.url='ftp://host/v1'", "url is http"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint plugins.scope_rl.model=y plugins.scope_rl.url='http://host:port/v1'", "url is http"),
    ("algo=scope_rl plugins.scope_rl.judge=endpoint plugins.scope_rl.model=y plugins.scope_rl.url='http://'", "url is http"),
    ("algo=gmpo sampler=qmc algo=[]", "algo is chosen 2 times"),
    ("algo=[vpo,gdpo]", "gdpo"),
    ("algo=[rloo,opo]", r"both replace advantage\(\)"),
    ("algo=[gspo,cispo]", "both replace"),
    ("algo=rloo plugins.grpo.std=none", "has no effect: rloo replaces"),
    ("algo=[adaptive_entropy,stare]", "both control the entropy"),
]  # fmt: skip


# --- what shows in the first step only

STEPS = [
    ("max_completion_length=100000", "positions"),
    ("max_prompt_length=2", "max_prompt_length is 2"),
    ("model.attention=spda", "did you mean 'sdpa'"),
    ("eval.correct=nobody", "eval.correct"),
    ("algo=vpo plugins.vpo.component=nobody", "nobody"),
    ("algo=process plugins.process.component=nobody", "nobody"),
    ("reward=function plugins.function.path={here}/r.py:score lr=1e30 steps=3", "not finite|NaN"),
    ("task=jsonl task.path={here}/emoji.jsonl reward=numeric", "characters that the tiny policy does not know"),
]


def steps() -> list[Case]:
    def prepare(folder):
        put("r.py", "def score(text):\n    return sum(map(ord, text)) % 7\n")(folder)
        put("emoji.jsonl", rows({"prompt": "\U0001f600", "answer": "1"}, times=20))(folder)

    return [Case(f"step {text[:50]}", tuple(text.split()), message, prepare, late=True) for text, message in STEPS]


def words() -> list[Case]:
    return [Case(f"words {text[:40]}", tuple(text.split()), message) for text, message in (*WORDS, *OPTIONS)]


# --- places

PLACES = [
    ("a file", "run_dir={here}/file", "run_dir: .* cannot be written to", put("file", "")),
    ("below a file", "run_dir={here}/file/deep/x", "run_dir: .* cannot be written to", put("file", "")),
    ("a device", "run_dir=/dev/null/x", "run_dir: .* cannot be written to", put("file", "")),
    ("a system's folder", "run_dir=/proc/grpozoo", "run_dir: .* cannot be written to", put("file", "")),
    ("a long name", f"run_dir={{here}}/{'n' * 300}", "run_dir", put("file", "")),
    ("a long path", f"run_dir={{here}}/{'n/' * 5000}", "run_dir", put("file", "")),
    ("a run is there", "run_dir={here}/old", "already holds a run", put("old/manifest.json", "{}")),
    ("two folders", "resume={here}/old run_dir={here}/new", "resume", put("old/manifest.json", "{}")),
    ("a list", "run_dir=[a]", "run_dir is the name of a folder, got", put("file", "")),
    ("a switch", "run_dir=true", "run_dir is the name of a folder, got 'True'", put("file", "")),
]


def places() -> list[Case]:
    return [Case(f"run_dir {name}", tuple(words.split()), message, make) for name, words, message, make in PLACES]


# --- data: (name, file, content, further words, message)

GOOD = rows({"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, times=10)
DEEP = "[" * 100_000
DATA = [
    ("no JSON", "d.jsonl", "{nothing}\n", "", r"d.jsonl:1: not JSON"),
    ("half a row", "d.jsonl", GOOD + '{"prompt": "1', "", r"d.jsonl:21: not JSON"),
    ("deep", "d.jsonl", DEEP + "\n", "", "d.jsonl:1: .*nested too deeply"),
    ("deep list", "d.json", DEEP, "", "d.json: .*nested too deeply"),
    ("deep value", "d.jsonl", '{"prompt": ' + DEEP + "\n", "", "d.jsonl:1: .*nested too deeply"),
    ("deep and whole", "d.jsonl", '{"prompt": "x", "more": ' + "[" * 900 + "]" * 900 + "}\n", "", "prompts_per_step|nested"),
    ("many digits", "d.jsonl", '{"prompt": "x", "answer": ' + "9" * 5000 + "}\n", "", "d.jsonl:1: .*digits"),
    ("a list", "d.jsonl", "[1, 2]\n", "", "a row is an object .* got list"),
    ("a number", "d.jsonl", "3\n", "", "a row is an object .* got int"),
    ("null", "d.jsonl", "null\n", "", "a row is an object .* got NoneType"),
    ("a text", "d.json", '"x"', "", "a row is an object .* got str"),
    ("list of numbers", "d.json", "[1]", "", "item 1: a row is an object"),
    ("empty", "d.jsonl", "", "", "has no rows"),
    ("blank", "d.jsonl", "\n \n", "", "has no rows"),
    ("empty list", "d.json", "[]", "", "has no rows"),
    ("empty objects", "d.jsonl", "{}\n{}\n", "", "no column for the prompt"),
    ("Latin-1", "d.jsonl", '{"prompt": "é"}\n'.encode("latin-1"), "", "not UTF-8 text"),
    ("UTF-16", "d.jsonl", GOOD.encode("utf-16"), "", "is it binary, or UTF-16"),
    ("NUL", "d.jsonl", b"\0" * 100, "", "it has a NUL byte"),
    ("NUL in CSV", "d.csv", b"prompt,answer\n\0,1\n", "", r"d.csv:2: not text, it has a NUL byte"),
    ("half a surrogate", "d.jsonl", '{"prompt": "\\ud800"}\n' * 20, "", "row 1: .*half of a surrogate pair"),
    ("no prompt", "d.jsonl", rows({"text": "x"}), "", r"no column for the prompt .*\ncolumns: text"),
    ("other column", "d.jsonl", GOOD, "task.prompt=promt", "no column 'promt', did you mean 'prompt'"),
    ("other answer", "d.jsonl", GOOD, "task.answer=anser", "no column 'anser', did you mean 'answer'"),
    ("other solution", "d.jsonl", GOOD, "task.solution=x", "no column 'x'"),
    ("other system", "d.jsonl", GOOD, "task.system=x", "no column 'x'"),
    ("both columns", "d.jsonl", GOOD, "task.prompt=prompt task.messages=prompt", "both name the prompt"),
    ("null prompt", "d.jsonl", rows({"prompt": None}), "", "row 1: column 'prompt' is empty"),
    ("empty prompt", "d.jsonl", rows({"prompt": " "}), "", "row 1: column 'prompt' is empty"),
    ("number as prompt", "d.jsonl", rows({"prompt": 3}), "", "row 1: .*holds int, not text"),
    ("object as prompt", "d.jsonl", rows({"prompt": {"a": 1}}), "", "row 1: .*holds dict"),
    ("no messages", "d.jsonl", rows({"messages": []}), "", "column 'messages' is empty"),
    ("odd message", "d.jsonl", rows({"messages": [3]}), "", "a message is {role, content}"),
    ("odd role", "d.jsonl", rows({"messages": [{"role": "boss", "content": "x"}]}), "", "a role among"),
    ("list as role", "d.jsonl", rows({"messages": [{"role": ["user"], "content": "x"}]}), "", "a role among"),
    ("odd content", "d.jsonl", rows({"messages": [{"role": "user", "content": [1]}]}), "", "text content"),
    ("assistant alone", "d.jsonl", rows({"messages": [{"role": "assistant", "content": "x"}]}), "", "only message is the assistant's"),
    ("long message", "d.jsonl", rows({"messages": [{"role": "boss", "content": "x" * 10**6}]}), "", "a role among"),
    ("too few", "d.jsonl", rows({"prompt": "1", "answer": "1"}), "", "the training set has"),
    ("all held out", "d.jsonl", GOOD, "task.heldout=20", "the training set has"),
    ("share of 1.5", "d.jsonl", GOOD, "task.heldout=1.5", "heldout is a share below 1"),
    ("no such file", "other", "", "task.path=nowhere.jsonl", "no such file"),
    ("no such file held out", "d.jsonl", GOOD, "task.heldout_path=nowhere.jsonl", "task.heldout_path=nowhere.jsonl: no such file"),
    ("no such pattern", "other", "", "task.path=nowhere/*.jsonl", "no such file"),
    ("odd pattern", "other", "", "task.path='[.jsonl'", "no such file"),
    ("a folder of nothing", "d/readme.txt", "", "task.path=d", "no such file"),
    ("a folder with that ending", "d.jsonl/x.txt", "", "task.path=d.jsonl", "no such file"),
    ("odd ending", "d.txt", GOOD, "", "'?.txt'? is not a format|.txt is not a format"),
    ("no ending", "d", GOOD, "", "a file without suffix is not a format"),
    ("gzip", "d.jsonl.gz", b"\x1f\x8b\x08", "", ".gz is not a format"),
    ("no Parquet", "d.parquet", "x" * 100, "", "not Parquet"),
    ("empty Parquet", "d.parquet", "", "", "not Parquet"),
    ("half Parquet", "d.parquet", b"PAR1" + b"\0" * 50 + b"PAR1", "", "not Parquet"),
    ("ragged CSV", "d.csv", "prompt,answer\n1,2,3\n", "", r"d.csv:2: the row does not have the 2 cells"),
    ("short CSV", "d.csv", "prompt,answer\n1\n", "", r"d.csv:2: the row does not have the 2 cells"),
    ("open quote", "d.csv", 'prompt,answer\n"1,2\n', "", r"d.csv:\d+: not CSV"),
    ("one name twice", "d.csv", "prompt,prompt\n1,2\n", "", "two columns have one name"),
    ("CSV of commas", "d.tsv", "prompt,answer\n1,2\n", "", "no column for the prompt"),
    ("empty path", "other", "", "task.path=''", "no such file|task.path"),
    ("long path", "other", "", f"task.path={'p' * 5000}.jsonl", "task.path"),
    ("NUL in the path", "other", "", "task.path=a\0b.jsonl", "task.path"),
    ("nobody's home", "other", "", "task.path=~nobody-of-this-name/d.jsonl", "task.path"),
]  # fmt: skip


def data() -> list[Case]:
    found = []
    for name, file, content, more, message in DATA:
        named = [] if "task.path=" in more else [f"task.path={{here}}/{file}"]
        words = ("task=jsonl", "reward=numeric", *named, *more.split())
        found.append(Case(f"data {name}", words, message, put(file, content)))
    return found
