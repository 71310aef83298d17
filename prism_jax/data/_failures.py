"""The causes of interruptions of a training run, and how often they occur."""

import os
from typing import Annotated, TypeAlias

import msgspec

from .._files import shown
from ._read import find_file, read_struct
from ._types import Count, Name, NonNegative, Positive, Text


_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Power: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=5)]
_Shape: TypeAlias = Annotated[float, msgspec.Meta(ge=0.01, le=1e9)]


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


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of events that make a node or a link slow for a while, and with it the whole job.

    **Attributes:**

    - `name`: the name of the kind.
    - `count`: how many such events were counted.
    - `duration_s`: the mean of how long they last, in seconds.
    - `slowdown`: how many times as long a step takes meanwhile.
    - `duration_power`: how much they differ in length, as `repair_power` of `RunCosts`.
    """

    name: Name
    count: _Number
    duration_s: NonNegative
    slowdown: Annotated[float, msgspec.Meta(ge=1, le=100)]
    duration_power: _Power = 1.0


class UnequalNodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much nodes differ: the factors on their rates have a gamma law of mean one.

    **Attributes:**

    - `shape`: the shape of the law. Below 1, a few bad nodes fail most.
    - `devices`: the devices of a node.
    """

    shape: _Shape
    devices: Count


class UnequalWeeks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much weeks differ, because interruptions come in clusters: their factors have a gamma law
    of mean one.

    **Attributes:**

    - `shape`: the shape of the law.
    - `counted`: in how many weeks the interruptions were counted. The fewer, the less is known of
        an average week.
    """

    shape: _Shape
    counted: Positive


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of interruptions over many hours of many devices.

    **Attributes:**

    - `device_hours`: the hours times devices over which the causes were counted.
    - `causes`: the causes of interruptions, each with its count.
    - `restart_s`: the time from when an interruption is noticed to the first step after it, in
        seconds.
    - `blocking_s`: for how long saving a checkpoint blocks the job, in seconds.
    - `source`: where the numbers are from.
    - `repair_s`: how long a node that was replaced is in repair, in seconds, on average.
    - `repair_power`: how much repairs differ; see `RunCosts`.
    - `nodes`, `weeks`: how much nodes differ, and weeks; `None` if all are alike.
    - `slow`: the kinds of events that slow a job for a while, counted over the same device-hours.
    - `by_age`: the rate in each year of the devices' age over that of all years; the last is that
        of all later ones. Empty if it is not known.
    """

    device_hours: Positive
    causes: Annotated[tuple[Cause, ...], msgspec.Meta(min_length=1)]
    restart_s: NonNegative
    blocking_s: NonNegative
    source: Text
    repair_s: NonNegative = 0.0
    repair_power: _Power = 0.0
    nodes: UnequalNodes | None = None
    weeks: UnequalWeeks | None = None
    slow: tuple[Slow, ...] = ()
    by_age: tuple[Positive, ...] = ()


def at_age(failures: Failures, years: float) -> Failures:
    """The failures of devices that are so many years old.

    **Raises:**

    A `ValueError` of one sentence if rates by age are not known.
    """
    if not failures.by_age:
        raise ValueError(
            "these failures have no rates `by_age`; take titan-old or titan-new, or leave the age "
            "out."
        )
    rate = failures.by_age[min(int(years), len(failures.by_age) - 1)]
    return msgspec.structs.replace(failures, device_hours=failures.device_hours / rate)


def load_failures(name: str | os.PathLike[str]) -> Failures:
    """Loads counts of failures by their name, if they are shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("count of failures", name)
    failures = read_struct(path, "failures", Failures)
    names = [cause.name for cause in failures.causes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"{shown(path)}: the cause `{twice[0]}` is given twice; give each cause once."
        )
    return failures
