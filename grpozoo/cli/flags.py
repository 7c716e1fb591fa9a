"""Hydra's flags, wherever they stand among the KEY=VALUE words; its own parser answers a mistake with a page of usage."""

from typing import NoReturn

from hydra._internal.utils import get_args_parser

from grpozoo.errors import UserError, nearest


def _parser():
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}\nflags: --help, --cfg job, -m (several runs); everything else is KEY=VALUE")

    parser.error = refuse
    return parser


FLAGS = tuple(flag for action in _parser()._actions for flag in action.option_strings)


def arranged(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(KEY=VALUE words, flags with their values), each in the order in which they were typed."""
    parser = _parser()
    for argument in arguments:
        flag = argument.split("=")[0]
        if flag.startswith("-") and flag not in FLAGS:
            parser.error(f"unknown flag {flag}{nearest(flag, FLAGS)}")
    words = parser.parse_intermixed_args(arguments).overrides
    flags = list(arguments)
    for word in words:
        flags.remove(word)
    return words, flags
