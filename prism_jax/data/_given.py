"""Which keys of a job were given, by its file and by overrides. All others have the default of the
job's software stack or of the schema.
"""

from collections.abc import Iterator
from typing import Any

import msgspec


class Given(msgspec.Struct, frozen=True, eq=False):
    """The keys of a job that were given. Jobs that differ only in these are equal.

    **Attributes:**

    - `keys`: dotted keys, with an index for each item of a list, such as `cluster.links[0].group`.
    """

    keys: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given)

    def __hash__(self) -> int:
        return 0


def dotted_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a table, with their values."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from dotted_keys(item, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield from dotted_keys(item, f"{prefix}[{i}]")
    else:
        yield prefix, value
