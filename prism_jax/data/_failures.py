"""The causes of interruptions of a training run, and how often they occur."""

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

    - `name`: the name of the cause.
    - `count`: how many interruptions by this cause were counted.
    - `detection_s`: the time until an interruption is noticed, in seconds.
    - `takes_node`: whether a node must be replaced by a spare.
    - `reallocates`: whether the run continues on other GPUs, as after a slow node was found.
    - `announced`: whether a checkpoint is saved just before the interruption, so that no work is
        lost.
    """

    name: Name
    count: _Number
    detection_s: NonNegative = 0.0
    takes_node: bool = False
    reallocates: bool = False
    announced: bool = False


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of interruptions over many hours of many devices.

    **Attributes:**

    - `device_hours`: the hours times devices over which the causes were counted.
    - `causes`: the causes of interruptions, each with its count.
    - `restart_s`: the time from when an interruption is noticed to the first step after it, in
        seconds.
    - `blocking_s`: for how long saving a checkpoint blocks the job, in seconds.
    - `source`: where the numbers are from.
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
    """Loads counts of failures by their name, if they are shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("hardware/failures", name)
    found = convert(read_toml(path, "failures"), Failures, lambda key: shown(path))
    names = [cause.name for cause in found.causes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"{shown(path)}: the cause `{twice[0]}` is given twice; give each cause once."
        )
    return found
