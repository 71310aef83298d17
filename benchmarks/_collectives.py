"""Collectives between nodes: modelled latencies beside measured ones."""

import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

from prism_jax.cluster import Group, collective_latency
from prism_jax.data import Cluster, load_cluster, load_kernels

from ._rows import read
from ._tables import by, percent, table


_MIB = 2**20
_TABLES = {"all_gather": "nccl_all_gather", "all_reduce": "nccl_all_reduce"}
_TABLES["all_to_all"] = "nccl_alltoall"
# A smaller collective takes tens of microseconds, mostly for its launch.
_LEAST = 16 * _MIB
# Alps: four GH200 with NVLink in a node, one Slingshot adapter of 200 Gb/s each.
_NODE, _NVLINK, _SLINGSHOT = 4, 450e9, 25e9
_BANDS = {"16 to 64 MiB": (_LEAST, 2**27), "128 to 512 MiB": (2**27, 2**30)}
_BANDS["1 GiB and more"] = (2**30, 2**40)


def collective_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Every row of the tables, from 16 MiB: its kind, GPUs and bytes, and its latencies in seconds.
    `error` is the logarithm of predicted over measured."""
    hopper = load_cluster("dgx-h100", 64)
    for kind, name in _TABLES.items():
        for row in read(folder / f"{name}.csv"):
            size = float(row["size(MB)"]) * _MIB
            # The bandwidth of the algorithm is bytes over seconds.
            seconds = size / (float(row["out algbw(GB/s)"]) * 1e9)
            yield _row("H100, EFA", kind, int(row["GPUs"]), size, seconds, hopper)
    inner, outer = hopper.links
    inner = msgspec.structs.replace(inner, group=_NODE, bandwidth_bytes_per_s=_NVLINK)
    outer = msgspec.structs.replace(outer, bandwidth_bytes_per_s=_SLINGSHOT)
    alps = msgspec.structs.replace(hopper, devices_per_node=_NODE, links=(inner, outer))
    for row in read(folder / "gh200_all_reduce_summary.csv"):
        gpus, size, seconds = int(row["ngpu"]), float(row["size_B"]), float(row["p50"]) * 1e-6
        if size >= _LEAST and gpus > _NODE:
            yield _row("GH200, Slingshot", "all_reduce", gpus, size, seconds, alps)


def _row(name: str, kind: str, gpus: int, size: float, measured: float, cluster: Cluster):
    """With as many GPUs on the outermost link as there are, at least."""
    *inner, outer = cluster.links
    outer = msgspec.structs.replace(outer, group=max(outer.group, gpus))
    cluster = msgspec.structs.replace(cluster, links=(*inner, outer))
    kernels = msgspec.structs.replace(load_kernels(cluster), network=1.0)
    predicted = collective_latency(kind, size, Group("all", gpus), cluster, kernels)
    row = {"table": name, "kind": kind, "gpus": gpus, "num_bytes": size, "measured": measured}
    return row | {"predicted": predicted, "error": math.log(predicted / measured)}


def collective_table(rows: list[dict[str, Any]]) -> str:
    """Medians of predicted over measured, minus one, by collective, GPUs and size, in Markdown."""
    cells, sums = [], []
    for name, of_table in by("table", rows).items():
        for kind, of_kind in by("kind", of_table).items():
            for gpus, mine in by("gpus", of_kind).items():
                bands = [
                    [row for row in mine if low <= row["num_bytes"] < high]
                    for low, high in _BANDS.values()
                ]
                cells.append((name, kind, gpus, *(_median(band) if band else "" for band in bands)))
            size = math.exp(statistics.mean(abs(row["error"]) for row in of_kind))
            text = f"{len(of_kind)} rows, median {_median(of_kind)}"
            sums.append(f"- {name}, {kind}: {text}, a factor of {size:.2f} off on average")
    lines = table(("measured on", "collective", "GPUs", *_BANDS), cells)
    return "\n".join([lines, "", "Over all sizes:", "", *sums])


def _median(rows: list[dict[str, Any]]) -> str:
    return percent(math.expm1(statistics.median(row["error"] for row in rows)), 0)
