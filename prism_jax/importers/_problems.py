"""A configuration of another framework, and everything in it that a job cannot express."""

import itertools as it
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .._misc import quoted
from ._shell_words import missing, without_missing


Table = dict[str, Any]


class NotImportableError(ValueError):
    """A configuration that cannot be a job.

    **Attributes:**

    - `reasons`: a clause for each thing that is in the way, that which costs the most first.
    - `kind`: whose configuration it is, if that is known; see `Imported.kind`.
    - `where`: what a message calls it.
    """

    def __init__(self, reasons: Iterable[str], kind: str = "") -> None:
        super().__init__()
        self.reasons: tuple[str, ...] = tuple(dict.fromkeys(reasons))
        self.kind: str = kind
        self.where: str = ""

    def __str__(self) -> str:
        before = f"{self.where}: " if self.where else ""
        return f"{before}this cannot be expressed as a job: {'; '.join(self.reasons)}."


class Problems(list[str]):
    """What a job cannot express, a clause for each.

    **Attributes:**

    - `percents`: of clauses, by how many percent of a step at most they would be left out; without,
        there is no job at all.
    - `notes`: what is imported in another way than it is said, or left out: a sentence for each.
    - `kind`: whose configuration it is, if that is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.percents: dict[str, float] = {}
        self.notes: list[str] = []
        self.kind: str = ""

    def add(self, clause: str, percent: float = math.inf) -> None:
        """Adds what is in the way."""
        if percent < math.inf:
            clause = f"{clause}, up to {percent:g} % of a step"
            self.percents[clause] = percent
        self.append(clause)

    def check(self) -> None:
        """Raises `NotImportableError` with everything that a job cannot express, by its cost."""
        if self:
            by_cost = sorted(
                dict.fromkeys(self), key=lambda clause: -self.percents.get(clause, math.inf)
            )
            raise NotImportableError((quoted(clause, 300) for clause in by_cost), self.kind)


class Reader:
    """A table that is read key by key, so that unread keys are known.

    **Attributes:**

    - `problems`: the problems found so far.
    - `notes`: what is imported in another way than it is said, or left out: a sentence for each.
    - `strict`: whether what is not known is a problem in place of a note.
    - `replaced`: the keys of the job that are given beside the table, with their values.
    """

    def __init__(
        self,
        table: Mapping[str, object],
        strict: bool = False,
        problems: Problems | None = None,
        names: Mapping[str, str] = {},
        replaced: Mapping[str, str] = {},
    ):
        self._table, self._names = table, names
        self._seen: set[str] = set()
        self._unsound: set[str] = set()
        self.problems = Problems() if problems is None else problems
        self.notes = self.problems.notes
        self.strict, self.replaced = strict, replaced

    def name(self, key: str) -> str:
        """A key by its name in the file."""
        return f"`{self._names.get(key, key)}`"

    def sound(self, *keys: str) -> bool:
        """Whether no other value stands for one of keys that could not be read."""
        return not self._unsound & {*keys}

    def _refuse(self, key: str, clause: str) -> None:
        """Names a value that could not be read, or the variable whose value it lacks."""
        self._unsound.add(key)
        lacks = missing(str(self._table.get(key)))
        if lacks:
            give = " ".join(f"`--var {quoted(name)}=...`" for name in dict.fromkeys(lacks))
            clause = f"has no value: give {give}"
        self.problems.add(f"{self.name(key)} {clause}")

    def __contains__(self, key: str) -> bool:
        return self._table.get(key) is not None

    def says(self, key: str) -> bool:
        """Whether the table has a key, of whatever value, also `None`."""
        return key in self._table

    def get(self, key: str, default: object = None) -> object:
        """The value of `key` in the table; `None` counts as missing."""
        self._seen.add(key)
        value = self._table.get(key)
        return default if value is None else value

    def flag(self, key: str) -> bool:
        """Whether a switch is on. A value that is neither on nor off is a problem."""
        value = self.get(key, False)
        word = value.lower() if isinstance(value, str) else value
        if word not in _ON and word not in _OFF:
            if missing(str(value)):
                return True  # A switch before words that have no value.
            self._refuse(key, f"is {quoted(value)}, but must be true or false")
        return word in _ON

    def rate(self, key: str, default: float, most: float = 1) -> float:
        """A number from 0 to `most`. Any other value is a problem."""
        value = self.get(key, default)
        try:
            number = float(str(value))
        except ValueError:
            number = -1.0
        if not 0 <= number <= most:
            self._refuse(key, f"is {quoted(value)}, but must be a number from 0 to {most:g}")
        return number

    def choice(self, key: str, *known: str) -> str:
        """One of the known words, by default the first. Any other value is a problem."""
        word = self.text(key, known[0])
        if word not in known:
            self._refuse(key, quoted(word))
            return known[0]
        return word

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None
    ) -> int:
        """A whole number of at least `least`, and at most `most`. Without it and a default, there
        is a problem.
        """
        return self.whole(key, self.get(key, default), least=least, most=most)

    def whole(self, key: str, value: object, *, least: int = 1, most: int | None = None) -> int:
        """The value of `key` as a whole number, as in `count`."""
        number = _whole(value)
        if number is None or number < least or (most is not None and number > most):
            problem = "is missing" if value is None else f"is {quoted(value)}"
            to = "" if most is None else f" to {most}, as for `model.num_layers`"
            self._refuse(key, f"{problem}, but must be a whole number from {least}{to}")
            return max(1, least)
        return number

    def given(self, **keys: str) -> Table:
        """The numbers that are in the table, by their keys in a job."""
        return {name: self.count(key) for name, key in keys.items() if key in self}

    def layers(self, key: str, default: int | None = None) -> int:
        """A number of layers, which is at least 1."""
        return self.count(key, default, most=MOST_LAYERS)

    def check_divisor(self, key: str, number: int, of: str, total: int) -> None:
        """A number that does not divide another key's is a problem."""
        if total % number != 0 and self.sound(key, of):
            problem = f"{self.name(key)} {number} does not divide {self.name(of)} {total}"
            self.problems.append(problem)

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key, default)
        if isinstance(value, list):
            value = f"[{', '.join(map(str, value))}]"
        return without_missing(value) if isinstance(value, str) else quoted(value, 10_000)

    def unread(self) -> list[str]:
        """The keys that were not read."""
        return [key for key in self._table if key not in self._seen]

    def check(self) -> None:
        """Raises `NotImportableError` with everything that a job cannot express."""
        self.problems.check()


def merged(names: Iterable[tuple[str, ...]]) -> list[Table]:
    """Layers by the names of their modules, with equal neighbours merged."""
    return [{"modules": [*key], "repeat": len([*run])} for key, run in it.groupby(names)]


# No model has more layers; what is listed one by one takes time and memory for each.
MOST_LAYERS = 1_000
_ON, _OFF = (True, "true", "yes", "1", ""), (False, "false", "no", "0")


def is_off(value: object) -> bool:
    """Whether a value means that something is not used: none, false, or zero."""
    word = value.lower() if isinstance(value, str) else value
    # A switch with an empty word is on.
    return (not value and value != "") or word in (*_OFF, "0.0", "none", "null", "[]")


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int | float) and abs(value) < 2**53 and value == int(value):
        return int(value)
    return None
