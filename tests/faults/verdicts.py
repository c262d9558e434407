"""A case of the campaign, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arena import Arena


@dataclass(frozen=True)
class Outcome:
    """What a case saw; a case that sees something wrong raises AssertionError."""

    happened: str
    equal: str = "-"
    """How the run compares with the unbroken one; "-" where it has to end instead."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    what: str
    run: Callable[[Arena], Outcome]
    quick: bool = False
    """Whether it belongs to the short form."""
