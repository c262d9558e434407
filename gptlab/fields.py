"""What a config's fields say about themselves: types, docs and limits, and the sentence where a value breaks them.

    >>> from gptlab.config import GPTConfig
    >>> from gptlab.fields import field_docs
    >>> field_docs(GPTConfig)["n_layer"]
    'Transformer blocks.'

Left out on purpose: the fields (`config.py`), which hands these names out too.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import math
import numbers
import typing
from functools import cache
from typing import Any, Literal

_ARTICLE: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class ConfigError(ValueError):
    """The user's mistake: one sentence that names the value, the limit and the mend. The command exits with 2."""


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field, by name: what help, tooltips and docs say."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(owner)).body[0]).body
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs[ast.unparse(field.target)] = inspect.cleandoc(str(doc.value.value))
    return docs


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The type of each field by name, resolved (`int`, `float | None`, `Literal[...]`)."""
    return typing.get_type_hints(cls)


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """' (did you mean ...?)' with the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_fields(config: object, limits: dict[str, tuple[float, float]]) -> None:
    """Refuses a value of the wrong type or out of its limits. A whole number is welcome where a float is asked for."""
    kinds = field_types(type(config))  # type: ignore[arg-type]  # mypy takes an instance's hash for the class's
    for name, kind in kinds.items():
        value = getattr(config, name)
        if typing.get_origin(kind) is Literal:
            if value not in typing.get_args(kind):
                legal = typing.get_args(kind)
                raise ConfigError(
                    f"{name} {value!r} is unknown{did_you_mean(str(value), legal)}: choose one of {', '.join(legal)}."
                )
            continue
        if value is None and type(None) in typing.get_args(kind):
            continue
        wanted = next((k for k in typing.get_args(kind) if k is not type(None)), kind)
        if isinstance(value, numbers.Real) and type(value).__module__ != "builtins":  # numpy's, as tables have them
            object.__setattr__(
                config, name, value := int(value) if isinstance(value, numbers.Integral) else float(value)
            )
        if wanted is float and type(value) is int:
            with contextlib.suppress(OverflowError):  # too long for a float: out of range below
                object.__setattr__(config, name, value := float(value))
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(f"{name} {value!r} is not {_ARTICLE[wanted]}: give {_ARTICLE[wanted]}.")
        if name in limits:
            check_range(name, value, *limits[name])


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuses a number that is none, or out of its limits (both included).

    Raises:
        ConfigError: with the value and the limits.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} {value} is not a finite number: give a value from {low:g} to {high:g}.")
    if not low <= value <= high:
        said = value if abs(value) < 1e30 else f"of {math.log10(abs(value)):.0f} digits"
        raise ConfigError(f"{name} {said} is out of range: give a value from {low:g} to {high:g}.")
