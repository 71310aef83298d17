"""Tables as CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with a header. Nested values have columns of their own, such as `gain.value`, or
    `interval.low` and `interval.high` for a pair of numbers. Unknown values are empty.
    """
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue().rstrip("\n")


def _flat(row: Mapping[str, Any], prefix: str = ""):
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and len(value) == 2 and _are_numbers(value):
            yield from _flat(dict(zip(("low", "high"), value, strict=True)), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(x, int | float) or x is None for x in values)
