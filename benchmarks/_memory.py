"""Peaks of memory that Megatron-LM's functional tests recorded, beside predicted peaks."""

import csv
import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from prism_jax.data import make_job
from prism_jax.importers import from_megatron
from prism_jax.prediction import memory


# A node of these tests. Where a recipe does not state its GPUs, it has as many nodes as its degrees
# need at least.
_NODE = 8
_NEAR = 0.20


class Row(NamedTuple):
    """A run: its group, name and device, the measured peak in bytes, and the predicted one."""

    group: str
    name: str
    device: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Memory(NamedTuple):
    """The runs whose arguments can be expressed, and the names of all others with the reason."""

    rows: list[Row]
    refused: list[tuple[str, str]]


def memory_rows(folder: pathlib.Path) -> Memory:
    """The runs of a folder like `../shared/data/megatron_golden`."""
    rows: list[Row] = []
    refused: list[tuple[str, str]] = []
    with (folder / "memory.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                found = _predicted(row)
            except ValueError as error:
                refused.append((row["case"], str(error).removeprefix(f"{row['case']}: ")))
                continue
            measured = float(row["mem_max_allocated_bytes"])
            rows.append(Row(row["group"], row["case"], row["device"], measured, found))
    return Memory(rows, refused)


def memory_table(found: Memory) -> str:
    """A line for each run, each refusal, each group and all."""
    return "\n".join(_lines(*found))


def _lines(rows: list[Row], refused: list[tuple[str, str]]) -> Iterator[str]:
    for row in rows:
        yield f"{row.error:+7.1%} {row.measured / 1e9:8.2f} GB  {row.name} {row.device}"
    for name, reason in refused:
        yield f"refused {name}: {reason}"
    groups = {row.group: [one for one in rows if one.group == row.group] for row in rows}
    for group, found in (groups | {"all": rows}).items():
        errors = [abs(row.error) for row in found]
        near = sum(error <= _NEAR for error in errors) / len(errors)
        yield (
            f"{group:10} {len(found):4} rows: median error {statistics.median(errors):.1%}, "
            f"{near:.0%} within {_NEAR:.0%}"
        )
    total = len(rows) + len(refused)
    yield f"expressed {len(rows)} of {total} rows ({len(rows) / total:.0%})"


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
