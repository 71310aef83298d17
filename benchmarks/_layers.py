"""One layer of experts, measured by itself: `../shared/data/steps/moe_layers.csv`.

The runs are short, so the GPU's clock is at its maximum, as in `kernels/shapes`; the tables of
training are those of steps at the limit of power.
"""

import functools as ft
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from prism_jax import data
from prism_jax.lowering import parts_of
from prism_jax.workload import Segment, split_mean
from prism_jax.workload._architecture import layers_of
from prism_jax.workload._parts import block

from ._published_models import EXPERTS, cluster_of, job_on, switches_of
from ._rows import WORDS, attempt, count, job_of, number, read, reason_lines
from ._tables import table


# How much longer a GEMM takes in training than in a short run: sustained runs of 10 GFLOP to 1
# TFLOP in bf16 take 1.10 to 1.20 times as long on H200 and B200 (`../shared/data/operators/power`).
# fp8 that is scaled by blocks reaches less than the delayed scaling of the tables: the one constant
# fitted to these rows (0.90 from the Mixtral rows alone, 0.98 from the DeepSeek rows).
_SUSTAINED, _BY_BLOCKS = 1.2, 0.92


def layer_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A forward and a backward for each row; one that cannot be predicted has a `reason`."""
    for row in read(folder / "moe_layers.csv"):
        found, wrong = attempt(_predicted, row)
        for i, phase in enumerate(("forward", "backward")):
            measured = number(row[f"{phase}_s"])
            one = {"table": "MoE layer", "name": f"{row['case']} {phase}"}
            reason = wrong if measured else f"no time: {phase}"
            more = {"reason": reason} if reason else {"predicted": found[i]}
            yield {**one, "measured": measured or 0.0, **more}


def layer_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    cells = (
        (
            row["name"],
            *(f"{1e3 * row[name]:.2f}" for name in ("measured", "predicted")),
            f"{row['predicted'] / row['measured'] - 1:+.1%}",
        )
        for row in rows
        if "predicted" in row
    )
    lines = table(("layer", "measured ms", "predicted ms", "error"), cells)
    return "\n".join([lines, *reason_lines(rows)])


def _predicted(row: dict[str, str]) -> tuple[float, float]:
    """Of the forward and the backward, in seconds."""
    machine, number = cluster_of(row["gpu"]), ft.partial(count, row)
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
    etp = number("etp") if row["etp"] else None
    job: Any = job_on(
        _model(row),
        data.Layout(tp=tp, cp=cp, dp=gpus // (tp * cp), ep=number("ep", 1), etp=etp),
        data.ScheduleConfig("1f1b", 1),
        data.Training(number("micro_batch"), sequence, **software),
        machine,
    )
    job_of(lambda _: job, row)
    (part,) = layers_of(job.model)
    (experts,) = part.modules
    costs = parts_of(job)
    blocks = dtype == "fp8" and not re.search("delayed|tensor|current|row", recipe)
    longer = _BY_BLOCKS if blocks else _SUSTAINED
    forward, backward = (
        _in_a_short_run(run(costs, []), longer) for run in (experts.forward, experts.backward)
    )
    return forward, backward


def _model(row: dict[str, str]) -> data.Model:
    """A layer of experts alone."""
    number = ft.partial(count, row)
    moe: dict[str, Any] = {key: number(name) for name, key in EXPERTS.items()}
    moe |= {"num_groups": number("groups", 1), "top_k_groups": number("group_topk", 1)}
    moe |= {"num_shared_experts": number("shared_expert", 0, 0)}
    if row["balance"]:
        moe["balance"] = re.split("[, ]", row["balance"])[0]
    return data.Model(
        hidden_size=number("hidden"),
        layers=(data.Layer(("moe",)),),
        modules={"moe": moe},
        vocab_size=number("tp", 1),
        activation="swiglu" if number("gated", 1, 0) else "gelu",
        bias=False,
    )


def _in_a_short_run(segments: list[Segment], longer: float) -> float:
    compute, exposed = split_mean(block([(segments, 1)]))
    compute["gemm"] /= longer
    return sum(compute.values()) + sum(exposed.values())
