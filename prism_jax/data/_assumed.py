"""Every key of a job with its value, and whether the value is the default."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ._job import Job
from ._reference import LEFT_OUT, Key, job_keys, toml_value, unit
from ._software import load_software


class AssumedKey(msgspec.Struct, frozen=True):
    """A key of a job.

    **Attributes:**

    - `key`: the dotted key, with an index for each item of a list.
    - `value`: its value in the job.
    - `unit`: the unit of a number, or empty.
    - `is_default`: whether the value is that of a job without the key.
    - `stack`: the software stack (`training.software`) that sets the key to this value, or empty.
    """

    key: str
    value: Any
    unit: str
    is_default: bool
    stack: str = ""

    @property
    def origin(self) -> str:
        """Where the value is from: `default`, `given`, or the software stack."""
        return self.stack or ("default" if self.is_default else "given")


def assumed_keys(job: Job) -> list[AssumedKey]:
    """All keys of a job, of its model and its cluster."""
    known = {key.key: key for key in job_keys()}
    found = msgspec.to_builtins(job)
    for name in LEFT_OUT:
        found.pop(name, None)
    keys = [_assumed(known, path, value) for path, value in _flat(found)]
    of_stack = {f"training.{name}": value for name, value in _stack(job).items()}
    name = "" if job.training is None else job.training.software or ""
    return [
        msgspec.structs.replace(key, stack=name)
        if key.key in of_stack and of_stack[key.key] == key.value
        else key
        for key in keys
    ]


def _stack(job: Job) -> dict[str, Any]:
    """The values that the software stack of a job sets."""
    if job.training is None or job.training.software is None:
        return {}
    try:
        return load_software(job.training.software).training
    except ValueError:  # The stack may be a file beside the job's file, whose path is unknown here.
        return {}


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
    if key is None:  # In a table of free names, such as the settings of a module.
        return AssumedKey(path, value, unit(path), False)
    default = key.default is not None and toml_value(value) == key.default
    return AssumedKey(path, value, key.unit, default)
