"""Every key of one job with its value, and whether that is the default."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ._job import Job
from ._reference import LEFT_OUT, Key, job_keys, toml_value, unit


class AssumedKey(msgspec.Struct, frozen=True):
    """A key of a job.

    **Attributes:**

    - `key`: with dots, and the number of each of a list.
    - `value`: of the job.
    - `unit`: of a number, or empty.
    - `is_default`: whether the value is what a job has that leaves the key out.
    """

    key: str
    value: Any
    unit: str
    is_default: bool


def assumed_keys(job: Job) -> list[AssumedKey]:
    """All keys of a job, of its model and its cluster."""
    known = {key.key: key for key in job_keys()}
    found = msgspec.to_builtins(job)
    for name in LEFT_OUT:
        found.pop(name, None)
    return [_assumed(known, path, value) for path, value in _flat(found)]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}[{i}]")
    else:
        yield prefix, value


def _assumed(known: dict[str, Key], path: str, value: Any) -> AssumedKey:
    key = known.get(re.sub(r"\[\d+\]", "[]", path))
    if key is None:  # Within a table of free names, such as the settings of a module.
        return AssumedKey(path, value, unit(path), False)
    default = key.default is not None and toml_value(value) == key.default
    return AssumedKey(path, value, key.unit, default)
