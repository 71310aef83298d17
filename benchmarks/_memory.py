"""Peaks of memory that Megatron-LM's functional tests recorded, beside predicted peaks."""

import json
import pathlib
import statistics
from typing import Any

from prism_jax.data import make_job
from prism_jax.importers import from_megatron
from prism_jax.prediction import memory

from ._rows import read
from ._tables import by


# A node of these tests. Where a recipe does not state its GPUs, it has as many nodes as its degrees
# need at least.
_NODE = 8
_NEAR = 0.20


def memory_rows(folder: pathlib.Path) -> dict[str, list[Any]]:
    """The runs of a folder like `../shared/data/megatron_golden`: `rows` have the recorded and the
    predicted peak, in bytes; `refused` are the names of runs whose arguments cannot be expressed,
    each with the reason.
    """
    found: dict[str, list[Any]] = {"rows": [], "refused": []}
    for row in read(folder / "memory.csv"):
        name = row["case"]
        try:
            predicted = _predicted(row)
        except ValueError as error:
            found["refused"].append((name, str(error).removeprefix(f"{name}: ")))
            continue
        measured = float(row["mem_max_allocated_bytes"])
        about = {"group": row["group"], "name": name, "device": row["device"]}
        peaks = {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        found["rows"].append(about | peaks)
    return found


def memory_table(found: dict[str, list[Any]]) -> str:
    """A line for each run, each refusal, each group and all."""
    rows, refused = found["rows"], found["refused"]
    if not rows:
        return "no runs whose arguments can be expressed"
    lines = [
        f"{row['error']:+7.1%} {row['measured'] / 1e9:8.2f} GB  {row['name']} {row['device']}"
        for row in rows
    ]
    lines += [f"refused {name}: {reason}" for name, reason in refused]
    for group, some in (by("group", rows) | {"all": rows}).items():
        errors = [abs(row["error"]) for row in some]
        near = sum(error <= _NEAR for error in errors) / len(errors)
        middle = f"median error {statistics.median(errors):.1%}, {near:.0%} within {_NEAR:.0%}"
        lines.append(f"{group:10} {len(some):4} rows: {middle}")
    total = len(rows) + len(refused)
    return "\n".join([*lines, f"expressed {len(rows)} of {total} rows ({len(rows) / total:.0%})"])


def _predicted(row: dict[str, str]) -> float:
    """The most that the allocator of the last rank holds, in bytes."""
    arguments = json.loads(row["args"])
    raw = from_megatron(arguments, int(row["gpus"] or _least_gpus(arguments)), row["case"])
    # Of the machine nothing but its size matters here.
    job = make_job({**raw, "cluster": "dgx-h100", "num_nodes": 8192}, pathlib.Path(row["case"]))
    return memory(job).ranks[-1].allocated


def _least_gpus(arguments: dict) -> int:
    """Of the whole nodes that hold a pipeline of whole stages."""
    kinds = ("tensor-model", "pipeline-model", "context", "expert-model")
    tp, pp, cp, ep = (int(arguments.get(f"{kind}-parallel-size", 1)) for kind in kinds)
    etp = int(arguments.get("expert-tensor-parallel-size", tp))
    ranks = pp * max(tp * cp, ep * etp)
    return -(-ranks // _NODE) * _NODE
