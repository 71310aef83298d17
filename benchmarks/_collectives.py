"""Collectives between nodes: modelled latencies beside measured ones."""

import csv
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from prism_jax.cluster import Group, collective_latency
from prism_jax.data import Cluster, load_cluster, load_kernels


_MIB = 2**20
_TABLES = {"all_gather": "nccl_all_gather", "all_reduce": "nccl_all_reduce"}
_TABLES["all_to_all"] = "nccl_alltoall"
# A smaller collective takes tens of microseconds, mostly for its launch.
_LEAST = 16 * _MIB
# Alps: four GH200 with NVLink in a node, one Slingshot adapter of 200 Gb/s each.
_NODE, _NVLINK, _SLINGSHOT = 4, 450e9, 25e9


class Row(NamedTuple):
    """One collective: its table, kind, GPUs and bytes, and its latencies in seconds."""

    table: str
    kind: str
    gpus: int
    num_bytes: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The logarithm of predicted over measured."""
        return math.log(self.predicted / self.measured)


def collective_rows(folder: pathlib.Path) -> Iterator[Row]:
    """Every row of the tables, from 16 MiB."""
    for kind, name in _TABLES.items():
        for gpus, size, seconds in _nccl(folder / f"{name}.csv"):
            cluster = _joined(load_cluster("dgx-h100", 64), gpus)
            found = _latency(kind, size, gpus, cluster)
            yield Row("H100, EFA", kind, gpus, size, seconds, found)
    cluster = _slingshot()
    with (folder / "gh200_all_reduce_summary.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            gpus, size = int(row["ngpu"]), float(row["size_B"])
            if size >= _LEAST and gpus > _NODE:
                found = _latency("all_reduce", size, gpus, _joined(cluster, gpus))
                seconds = float(row["p50"]) * 1e-6
                yield Row("GH200, Slingshot", "all_reduce", gpus, size, seconds, found)


def _nccl(path: pathlib.Path) -> Iterator[tuple[int, float, float]]:
    """GPUs, bytes and seconds, from the bandwidth of the algorithm, which is bytes over seconds."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            size = float(row["size(MB)"]) * _MIB
            yield int(row["GPUs"]), size, size / (float(row["out algbw(GB/s)"]) * 1e9)


def _joined(cluster: Cluster, gpus: int) -> Cluster:
    """A cluster whose outermost link joins at least so many GPUs."""
    outer = cluster.links[-1]
    outer = msgspec.structs.replace(outer, group=max(outer.group, gpus))
    return msgspec.structs.replace(cluster, links=(*cluster.links[:-1], outer))


def _slingshot() -> Cluster:
    cluster = load_cluster("dgx-h100", 64)
    inner, outer = cluster.links
    inner = msgspec.structs.replace(inner, group=_NODE, bandwidth_bytes_per_s=_NVLINK)
    outer = msgspec.structs.replace(outer, bandwidth_bytes_per_s=_SLINGSHOT)
    return msgspec.structs.replace(cluster, devices_per_node=_NODE, links=(inner, outer))


def _latency(kind: str, size: float, gpus: int, cluster: Cluster) -> float:
    group = Group("all", gpus)
    tables = msgspec.structs.replace(load_kernels(cluster), network=1.0)
    return collective_latency(kind, size, group, cluster, tables)


def collective_table(rows: list[Row]) -> str:
    """Medians of predicted over measured, minus one, by collective, GPUs and size, in Markdown."""
    bands = ((_LEAST, 2**27), (2**27, 2**30), (2**30, 2**40))
    names = ("16 to 64 MiB", "128 to 512 MiB", "1 GiB and more")
    header = ("measured on", "collective", "GPUs", *names)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for key in dict.fromkeys((row.table, row.kind, row.gpus) for row in rows):
        mine = [row for row in rows if (row.table, row.kind, row.gpus) == key]
        cells = [_median([r for r in mine if low <= r.num_bytes < high]) for low, high in bands]
        lines.append("| " + " | ".join([*map(str, key), *cells]) + " |")
    lines += ["", "Over all sizes:", ""]
    for key in dict.fromkeys((row.table, row.kind) for row in rows):
        errors = [row.error for row in rows if (row.table, row.kind) == key]
        each = statistics.mean(map(abs, errors))
        middle = math.expm1(statistics.median(errors))
        text = f"{len(errors)} rows, median {100 * middle:+.0f} %"
        lines.append(f"- {', '.join(key)}: {text}, a factor of {math.exp(each):.2f} off on average")
    return "\n".join(lines)


def _median(rows: list[Row]) -> str:
    if not rows:
        return ""
    return f"{100 * math.expm1(statistics.median(row.error for row in rows)):+.0f} %"
