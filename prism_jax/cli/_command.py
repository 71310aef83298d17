"""What a command is: a function, and its arguments as data, so that several can share them."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .._summary import Table


@dataclasses.dataclass(frozen=True)
class Argument:
    """The arguments of `add_argument`."""

    name: str
    how: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Output:
    """What a command found.

    **Attributes:**

    - `result`: what `--json` prints.
    - `blocks`: what is printed without it, an empty line between any two. Of a command with
        `--csv`, the first table is what that prints.
    """

    result: dict[str, Any]
    blocks: Sequence[Table | str]

    def text(self) -> str:
        return "\n\n".join(filter(None, map(str, self.blocks)))

    def csv(self) -> str:
        return next(block for block in self.blocks if isinstance(block, Table)).csv()


@dataclasses.dataclass(frozen=True)
class Command:
    """**Attributes:**

    - `run`: what it does. It raises a `ValueError` of one sentence for bad input.
    - `help`: what it does, in a sentence without a full stop.
    - `example`: words that follow its name, in an example.
    - `arguments`: what follows its name.
    - `csv`: whether its table can be printed as CSV.
    """

    run: Callable[[argparse.Namespace], Output]
    help: str
    example: str
    arguments: tuple[Argument, ...]
    csv: bool


def command(
    help: str, example: str, *arguments: Argument, csv: bool = False
) -> Callable[[Callable[[argparse.Namespace], Output]], Command]:
    """Makes a function the command of its file."""
    return lambda run: Command(run, help, example, arguments, csv)


def argument(
    name: str,
    metavar: str | None,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    **more: Any,
) -> Argument:
    """An argument, or an option with a value."""
    return Argument(
        name, {"metavar": metavar, "help": help, "type": type, "default": default, **more}
    )


def repeated(name: str, metavar: str, help: str, **more: Any) -> Argument:
    """An option that can be given several times."""
    return argument(name, metavar, help, default=[], action="append", **more)


def flag(name: str, help: str) -> Argument:
    return Argument(name, {"help": help, "action": "store_true"})
