"""Peaks of memory that Megatron-LM's functional tests recorded, against predicted ones."""

import csv
import json
import pathlib
import statistics

from prism_jax.data import make_job
from prism_jax.importers import from_megatron
from prism_jax.program import memory


# A node of these tests; where a recipe does not state its GPUs.
_NODE = 8
_SHARE = 0.20


def predicted(row: dict[str, str]) -> float:
    """The most that the allocator of the last rank holds, in bytes, by the arguments of a row.

    **Raises:**

    `ValueError` where the arguments cannot be expressed.
    """
    if row["group"] == "bert":
        raise ValueError("a bidirectional model")
    arguments = json.loads(row["args"])
    raw = from_megatron(arguments, int(row["gpus"] or _NODE), row["case"])
    # Of the machine nothing but its size matters here.
    job = make_job({**raw, "cluster": "dgx-h100-65536"}, pathlib.Path(row["case"]))
    return memory(job).ranks[-1].allocated


def print_memory(path: pathlib.Path) -> None:
    """Prints each row that is refused, with the reason, and the errors of all others."""
    errors: dict[str, list[float]] = {}
    refused: list[tuple[str, str]] = []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        try:
            found = predicted(row)
        except ValueError as error:
            refused.append((row["case"], str(error).removeprefix(f"{row['case']}: ")))
            continue
        measured = float(row["mem_max_allocated_bytes"])
        errors.setdefault(row["group"], []).append(found / measured - 1)
        print(
            f"{found / measured - 1:+7.1%} {measured / 1e9:8.2f} GB  {row['case']} {row['device']}"
        )
    for case, reason in refused:
        print(f"refused {case}: {reason}")
    for group, found in [
        *errors.items(),
        ("all", [one for some in errors.values() for one in some]),
    ]:
        sizes = [abs(error) for error in found]
        share = sum(size <= _SHARE for size in sizes) / len(sizes)
        print(
            f"{group:10} {len(found):4} rows: median error {statistics.median(sizes):.1%}, "
            f"{share:.0%} within {_SHARE:.0%}"
        )
    print(f"expressed {len(rows) - len(refused)} of {len(rows)} rows")
