"""Parts of a step, measured by themselves: collectives between nodes, and one layer of experts.

The runs of layers are short, so the GPU's clock is at its maximum, as in `kernels/shapes`; the
tables of training are those of steps at the limit of power.
"""

import functools as ft
import math
import pathlib
import re
import statistics
from typing import Any

from msgspec.structs import replace

from prism_jax import data
from prism_jax.cluster import Group, collective_latency
from prism_jax.data import Cluster, load_cluster, load_kernels
from prism_jax.lowering import job_parts
from prism_jax.workload import Segment, split_mean
from prism_jax.workload._architecture import layers_of
from prism_jax.workload._parts import block

from .published_models import EXPERTS, cluster_of, job_on, switches_of
from .rows import WORDS, attempt, count, job_of, number, read, reason_lines
from .tables import Row, Rows, by, percent, table, table_of


_MIB = 2**20
_TABLES = {"all_gather": "all_gather", "all_reduce": "all_reduce", "all_to_all": "alltoall"}
# A smaller collective takes tens of microseconds, mostly for its launch.
_LEAST = 16 * _MIB
# Alps: four GH200 with NVLink in a node, one Slingshot adapter of 200 Gb/s each.
_NODE, _NVLINK, _SLINGSHOT = 4, 450e9, 25e9
_BANDS = {"16 to 64 MiB": (_LEAST, 2**27), "128 to 512 MiB": (2**27, 2**30)}
_BANDS["1 GiB and more"] = (2**30, 2**40)


def collective_rows(folder: pathlib.Path) -> Rows:
    """Every row of the tables, from 16 MiB: its kind, GPUs and bytes, and its latencies in seconds.
    `error` is the logarithm of predicted over measured."""
    hopper = load_cluster("dgx-h100", 64)
    for kind, name in _TABLES.items():
        for row in read(folder / f"nccl_{name}.csv"):
            size = float(row["size(MB)"]) * _MIB
            # The bandwidth of the algorithm is bytes over seconds.
            seconds = size / (float(row["out algbw(GB/s)"]) * 1e9)
            yield _row("H100, EFA", kind, int(row["GPUs"]), size, seconds, hopper)
    inner, outer = hopper.links
    inner = replace(inner, group=_NODE, bandwidth_bytes_per_s=_NVLINK)
    links = (inner, replace(outer, bandwidth_bytes_per_s=_SLINGSHOT))
    alps = replace(hopper, devices_per_node=_NODE, links=links)
    for row in read(folder / "gh200_all_reduce_summary.csv"):
        gpus, size, seconds = int(row["ngpu"]), float(row["size_B"]), float(row["p50"]) * 1e-6
        if size >= _LEAST and gpus > _NODE:
            yield _row("GH200, Slingshot", "all_reduce", gpus, size, seconds, alps)


def _row(name: str, kind: str, gpus: int, size: float, measured: float, cluster: Cluster):
    """With as many GPUs on the outermost link as there are, at least."""
    *inner, outer = cluster.links
    outer = replace(outer, group=max(outer.group, gpus))
    cluster = replace(cluster, links=(*inner, outer))
    kernels = replace(load_kernels(cluster), network=1.0)
    predicted = collective_latency(kind, size, Group("all", gpus), cluster, kernels)
    row = {"table": name, "kind": kind, "gpus": gpus, "num_bytes": size, "measured": measured}
    return row | {"predicted": predicted, "error": math.log(predicted / measured)}


def collective_table(rows: list[Row]) -> str:
    """Medians of predicted over measured, minus one, by collective, GPUs and size, in Markdown."""
    cells, sums = [], []
    for name, of_table in by("table", rows).items():
        for kind, of_kind in by("kind", of_table).items():
            for gpus, mine in by("gpus", of_kind).items():
                cells.append((name, kind, gpus, *(_median(mine, *b) for b in _BANDS.values())))
            size = math.exp(statistics.mean(abs(row["error"]) for row in of_kind))
            text = f"{len(of_kind)} rows, median {_median(of_kind)}"
            sums.append(f"- {name}, {kind}: {text}, a factor of {size:.2f} off on average")
    lines = table(("measured on", "collective", "GPUs", *_BANDS), cells)
    return "\n".join([lines, "", "Over all sizes:", "", *sums])


def _median(rows: list[Row], low: float = 0.0, high: float = math.inf) -> str:
    """Of the rows from so many bytes to so many."""
    errors = [row["error"] for row in rows if low <= row["num_bytes"] < high]
    return percent(math.expm1(statistics.median(errors)), 0) if errors else ""


# How much longer a GEMM takes in training than in a short run: sustained runs of 10 GFLOP to 1
# TFLOP in bf16 take 1.10 to 1.20 times as long on H200 and B200 (`../shared/data/operators/power`).
# fp8 that is scaled by blocks reaches less than the delayed scaling of the tables: the one constant
# fitted to these rows (0.90 from the Mixtral rows alone, 0.98 from the DeepSeek rows).
_SUSTAINED, _BY_BLOCKS = 1.2, 0.92


def layer_rows(folder: pathlib.Path) -> Rows:
    """A forward and a backward for each row; one that cannot be predicted has a `reason`."""
    for row in read(folder / "moe_layers.csv"):
        found, wrong = attempt(_predicted_layer, row)
        for i, phase in enumerate(("forward", "backward")):
            measured = number(row[f"{phase}_s"]) or 0.0
            reason = wrong if measured else f"no time: {phase}"
            one = {"table": "MoE layer", "name": f"{row['case']} {phase}", "measured": measured}
            yield one | ({"reason": reason} if reason else {"predicted": found[i]})


def layer_table(rows: list[Row]) -> str:
    """In Markdown."""
    columns = {"layer": "{name}", "measured ms": "{measured:.2fm}"}
    columns |= {"predicted ms": "{predicted:.2fm}", "error": "{error:+.1%}"}
    shown = table_of([row for row in rows if "predicted" in row], columns)
    return "\n".join([shown.replace(" %", "%"), *reason_lines(rows)])


def _predicted_layer(row: dict[str, str]) -> tuple[float, float]:
    """Of the forward and the backward, in seconds."""
    number = ft.partial(count, row)
    tp, cp, gpus, sequence = number("tp", 1), number("cp", 1), number("gpus"), number("sequence")
    tokens = number("micro_batch") * sequence // cp
    if number("pp", 1) > 1 or gpus % (tp * cp):
        raise ValueError("a layer has no pipeline, and tp*cp divides its GPUs")
    if number("tokens_per_gpu", tokens) not in (tokens, tokens // tp):
        raise ValueError("`tokens_per_gpu` is not `micro_batch` times `sequence` over `cp`")
    recipe = row["fp8_recipe"].lower()
    dtype = WORDS["dtypes"].get(row["dtype"].lower(), row["dtype"])
    dtype = "mxfp8" if dtype == "fp8" and "mx" in recipe else dtype
    software = {"software": "megatron-core-2024", **switches_of("megatron-core-2024")}
    software |= {"dtype": dtype, "token_dispatcher": row["dispatcher"]}
    etp, ep = number("etp") if row["etp"] else None, number("ep", 1)
    layout = data.Layout(tp=tp, cp=cp, dp=gpus // (tp * cp), ep=ep, etp=etp)
    training = data.Training(number("micro_batch"), sequence, **software)
    parts = (_layer_of(row), layout, data.ScheduleConfig("1f1b", 1), training)
    job: Any = job_of(lambda _: job_on(*parts, cluster_of(row["gpu"])), row)
    ((experts,),) = (part.modules for part in layers_of(job.model))
    costs = job_parts(job)
    blocks = dtype == "fp8" and not re.search("delayed|tensor|current|row", recipe)
    longer = _BY_BLOCKS if blocks else _SUSTAINED
    both = experts.forward(costs, []), experts.backward(costs, [])
    return _in_a_short_run(both[0], longer), _in_a_short_run(both[1], longer)


def _layer_of(row: dict[str, str]) -> data.Model:
    """A layer of experts alone."""
    number = ft.partial(count, row)
    moe: dict[str, Any] = {key: number(name) for name, key in EXPERTS.items()}
    moe |= {"num_groups": number("groups", 1), "top_k_groups": number("group_topk", 1)}
    moe["num_shared_experts"] = number("shared_expert", 0, 0)
    if row["balance"]:
        moe["balance"] = re.split("[, ]", row["balance"])[0]
    keys: Any = {"hidden_size": number("hidden"), "vocab_size": number("tp", 1), "bias": False}
    keys["activation"] = "swiglu" if number("gated", 1, 0) else "gelu"
    return data.Model(layers=(data.Layer(("moe",)),), modules={"moe": moe}, **keys)


def _in_a_short_run(segments: list[Segment], longer: float) -> float:
    compute, exposed = split_mean(block([(segments, 1)]))
    compute["gemm"] /= longer
    return sum(compute.values()) + sum(exposed.values())
