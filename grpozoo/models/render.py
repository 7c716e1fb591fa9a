"""The child of `template.try_out`: renders one conversation from stdin under limits, and answers with a line of JSON.

Run as a file, so that nothing but transformers' own rendering is imported. {"length": characters}, or {"error": text,
"syntax": whether the template can never be rendered, "memory": whether it was stopped}; no line: it ran out of time.
"""

import json
import math
import resource
import sys
from pathlib import Path


def limit(seconds: int, megabytes: int) -> None:
    """Processor seconds and new memory from here on; memory where the system can limit and tell it (Linux)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _at_most(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
    status = Path("/proc/self/status")
    if status.is_file():
        table = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        _at_most(resource.RLIMIT_DATA, int(table["VmData"].split()[0]) * 1024 + megabytes * 2**20)


def _at_most(kind: int, value: int) -> None:
    soft, hard = resource.getrlimit(kind)
    given = [old for old in (soft, hard) if old != resource.RLIM_INFINITY]  # stricter ones stay
    resource.setrlimit(kind, (min(value, *given) if given else value, hard))


def main() -> dict:
    """Render what stdin asks for."""
    asked = json.load(sys.stdin)
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    limit(asked["seconds"], asked["megabytes"])
    try:
        rendered, _ = render_jinja_template(
            conversations=[asked["messages"]],
            chat_template=asked["template"],
            add_generation_prompt=True,
            **asked["special"],
        )
    except MemoryError:
        return {"error": "out of memory", "syntax": False, "memory": True}
    except Exception as error:
        return {"error": str(error)[:300], "syntax": isinstance(error, TemplateSyntaxError), "memory": False}
    return {"length": len(rendered[0])}


if __name__ == "__main__":
    print(json.dumps(main()))
