"""A tokenizer's chat template: a program that came with the model, so it is tried out under limits before it is used.

The first conversation of a template is rendered in a child process that may take `SECONDS` of a processor and
`MEGABYTES`: a template of endless loops or giant strings ends there, not here. What passes is rendered in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpozoo.errors import UserError

SECONDS, MEGABYTES = 10, 512
CHARACTERS = 10_000_000  # a conversation that becomes longer is no prompt
WAIT = 300  # seconds after which a child that gets no processor is given up
_tried: set[str] = set()  # templates that kept to the limits


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], prompt: str) -> str:
    """The text that the model sees, up to where the assistant speaks. prompt: its id, for messages to the user."""
    try_out(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything, and many do on purpose
        said = " ".join(str(error).split())[:300] or type(error).__name__
        roles = ", ".join(str(message.get("role")) for message in messages[:5])
        raise UserError(
            f"the model's chat template refuses prompt {prompt!r} (roles: {roles}): {said}\n"
            "change the data (many templates know no system role), or use model.chat_template=false"
        ) from None
    if len(text) > CHARACTERS:
        raise UserError(f"the model's chat template makes {len(text)} characters of prompt {prompt!r}: {_ADVICE}")
    return text


_ADVICE = "don't trust it\nuse model.chat_template=false, or repair chat_template in the tokenizer's folder"


def try_out(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Refuse a template that is no program, or one that takes too long or too much on these messages. Once for each."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several by name and none is the default
        raise UserError(f"the model's chat template cannot be chosen: {str(error)[:300]}") from None
    if template in _tried:
        return
    answer = _child(template, messages, tokenizer.special_tokens_map)
    if answer is None:
        raise UserError(f"the model's chat template does not end within {SECONDS} seconds: {_ADVICE}")
    if answer.get("memory") or answer.get("length", 0) > CHARACTERS:
        raise UserError(f"the model's chat template makes a giant text of one conversation: {_ADVICE}")
    if answer.get("syntax"):
        raise UserError(
            f"the model's chat template is not valid: {answer['error']}\n"
            "use model.chat_template=false, or repair chat_template in the tokenizer's folder"
        )
    _tried.add(template)


def _child(template: str, messages: Sequence[dict[str, Any]], special: dict[str, Any]) -> dict[str, Any] | None:
    """What `render.py` answers; None if it was stopped."""
    asked = {"template": template, "messages": list(messages), "special": special}
    asked |= {"seconds": SECONDS, "megabytes": MEGABYTES}
    command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("render.py"))]
    path = os.pathsep.join(folder for folder in sys.path if folder)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked, default=str),
            capture_output=True,
            text=True,
            timeout=WAIT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode > 0:  # not stopped by a signal: it could not start
        raise UserError(f"the model's chat template could not be tried out: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout) if done.returncode == 0 else None
