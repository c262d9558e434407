"""Flags of the config's fields, with the docstring under each as help, and a parser that answers in one sentence.

    >>> from gptlab.flags import config_of
    >>> config_of({"n_layer": 2}, "tiny").n_embd
    64

The parser is the standard library's argparse: the sentences, the start within a fraction of a second and flags that
say whether they were given are what a generator of whole parsers (tyro) could not give. Left out on purpose: the
subcommands (`cli.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from gptlab.config import ConfigError, GPTConfig, TrainConfig, did_you_mean, field_docs, field_types
from gptlab.presets import PRESETS, preset

_TRUTH = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
_SHOWN = {"None": "none", "True": "yes", "False": "no"}


class Parser(argparse.ArgumentParser):
    """argparse with one sentence for what is wrong, and n_layer welcome where n-layer is meant."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}: see `{self.prog} --help`.")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; an unknown flag is refused, with the nearest known one, before anything else is looked at."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        words = list(argv)
        for index, word in enumerate(words):
            if word == "--":
                break
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                plain = flag.replace("_", "-")
                if plain not in known:
                    raise ConfigError(f"There is no flag {flag}{did_you_mean(plain, known)}: see `{self.prog} --help`.")
                words[index] = plain + equals + value
        return self.parse_args(words)


def whole(low: int, high: int) -> Callable[[str], int]:
    """The `type` of a flag that is no field of the config: a whole number with limits, both included."""
    return functools.partial(_number, int, low, high)


def real(low: float, high: float) -> Callable[[str], float]:
    """The same for any finite number."""
    return functools.partial(_number, float, low, high)


def _number(kind: Callable[[str], Any], low: float, high: float, text: str) -> Any:
    """The number in a text.

    Raises:
        argparse.ArgumentTypeError: it is none, or out of its limits; the parser puts the flag's name in front.
    """
    what = f"give a {'whole ' * (kind is int)}number from {low:g} to {high:g}"
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no {'whole ' * (kind is int)}number, {what}") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text[:40]} is out of range, {what}")
    return value


def add_fields(parser: Parser, *, several: bool = False) -> None:
    """A flag for each field of TrainConfig; only those that are given appear in the result, as texts.

    Args:
        several: a flag takes one or more values.
    """
    docs, kinds = field_docs(TrainConfig), field_types(TrainConfig)
    shape = parser.add_argument_group("the GPT")
    training = parser.add_argument_group("training")
    parser.add_argument(
        "--preset", metavar="NAME", help=f"size to start from; the other flags change it: {', '.join(PRESETS)}"
    )
    for name, kind in kinds.items():
        group = shape if name in field_types(GPTConfig) else training
        default = getattr(TrainConfig, name)
        shown = f"{default:g}" if isinstance(default, float) else _SHOWN.get(str(default), default)
        text = f"{docs[name]} [{shown}]".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if kind is bool and not several:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        metavar = "|".join(choices) or {int: "N", int | None: "N", str: "TEXT", str | None: "TEXT", bool: "yes|no"}.get(
            kind, "X"
        )
        more: dict[str, Any] = {"nargs": "+"} if several else {}
        group.add_argument(flag, dest=name, metavar=metavar, default=argparse.SUPPRESS, help=text, **more)


def field_value(name: str, text: str | bool, cls: type = TrainConfig) -> Any:
    """The value that a flag's text means.

    Args:
        cls: whose field it is.

    Raises:
        ConfigError: it is none of the field's type.
    """
    kind = field_types(cls)[name]
    options = typing.get_args(kind)
    if isinstance(text, bool) or kind is str or typing.get_origin(kind) is Literal:
        return text
    if type(None) in options:
        if text.lower() == "none":
            return None
        kind = next(option for option in options if option is not type(None))
    try:
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {int: "a whole number", float: "a number", bool: "yes or no"}[kind]
        raise ConfigError(f"{name} {text[:40]!r} is not {wanted}: give {wanted}.") from None


def config_of(given: dict[str, Any], base: str | None) -> TrainConfig:
    """The config of a preset (or the defaults) and the fields that were given. Without a preset, weights to begin with
    decide what those leave open.

    A path is made whole: a run is resumed and sampled from other folders than the one it was started in.
    """
    values = dict(given)
    for name in ("data", "init_from"):
        if isinstance(values.get(name), str):  # what is no text is refused with its name below
            values[name] = whole_path(values[name])
    if isinstance(values.get("init_from"), str):
        from gptlab.initial import shape_of

        if base is None:
            values = shape_of(values["init_from"]) | values
    return preset(base, **values) if base else TrainConfig.from_dict(values)


def whole_path(data: str) -> str:
    """`data` with its folder, where it names a file or folder that is there; a source's or corpus's name as it is."""
    from gptlab.sources import NAMES

    path = os.path.expanduser(data)
    return os.path.abspath(path) if data not in NAMES and os.path.exists(path) else data


def given_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that flags gave, in the config's order: texts, or lists of them."""
    return {name: getattr(arguments, name) for name in field_types(TrainConfig) if hasattr(arguments, name)}
