"""What interrupts a training run, and how often."""

import os
from typing import Annotated, TypeAlias

import msgspec

from .._files import shown
from ._find import find_file, list_names
from ._read import convert, read_toml
from ._types import Name, NonNegative, Positive, Text


_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cause of interruptions.

    **Attributes:**

    - `name`.
    - `count`: how many interruptions were seen.
    - `detection_s`: until one is noticed, in seconds.
    - `takes_node`: whether a node must be replaced, by a spare.
    - `reallocates`: whether the run goes on with other GPUs, as after a slow node was found.
    - `announced`: whether a checkpoint is saved just before, so that no work is lost.
    """

    name: Name
    count: _Number
    detection_s: NonNegative = 0.0
    takes_node: bool = False
    reallocates: bool = False
    announced: bool = False


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often runs are interrupted, counted over so many hours of devices.

    **Attributes:**

    - `device_hours`: hours times devices in which the causes were counted.
    - `causes`.
    - `restart_s`: from the moment when an interruption is noticed to the first step, in seconds.
    - `blocking_s`: for how long saving a checkpoint holds up the job, in seconds.
    - `source`.
    """

    device_hours: Positive
    causes: Annotated[tuple[Cause, ...], msgspec.Meta(min_length=1)]
    restart_s: NonNegative
    blocking_s: NonNegative
    source: Text


def list_failures() -> tuple[str, ...]:
    """The names of the shipped counts of failures."""
    return list_names("hardware/failures")


def load_failures(name: str | os.PathLike[str]) -> Failures:
    """Counts of failures, by their name or the path of their file.

    **Raises:**

    A `ValueError` of one sentence that names file and key.
    """
    path = find_file("hardware/failures", name)
    found = convert(read_toml(path, "failures"), Failures, lambda key: shown(path))
    names = [cause.name for cause in found.causes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"{shown(path)}: the cause `{twice[0]}` stands twice; give each cause once."
        )
    return found
