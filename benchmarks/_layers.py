"""One layer of experts, measured by itself: `../shared/data/steps/moe_layers.csv`.

The runs are short, so the GPU's clock is at its maximum, as in `kernels/shapes`; the tables of
training are those of steps at the limit of power.
"""

import csv
import pathlib
from collections.abc import Iterator
from typing import Any

from prism_jax import data
from prism_jax.workload import Segment, split_mean
from prism_jax.workload._costs import Costs
from prism_jax.workload._parts import block
from prism_jax.workload.modules._moe import MoE


# How much longer a GEMM in bf16 takes in training than in a short run: sustained runs of 10 GFLOP
# to 1 TFLOP take 1.10 to 1.20 times as long on H200 and B200 (`../shared/data/operators/power`).
# fp8 is scaled by blocks here, which reaches less than the delayed scaling of the tables: the one
# constant fitted to these rows (0.90 from the Mixtral rows alone, 0.98 from the DeepSeek rows).
_SUSTAINED = {"bf16": 1.2, "fp8": 0.92}


def layer_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A forward and a backward for each row."""
    with (folder / "moe_layers.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            forward, backward = _predicted(row)
            for phase, seconds in (("forward", forward), ("backward", backward)):
                measured = float(row[f"{phase}_s"])
                name = f"{row['case']} {phase}"
                yield {
                    "table": "MoE layer",
                    "name": name,
                    "measured": measured,
                    "predicted": seconds,
                }


def layer_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| layer | measured ms | predicted ms | error |", "|---" * 4 + "|"]
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        lines.append(
            f"| {row['name']} | {1e3 * row['measured']:.2f} | {1e3 * row['predicted']:.2f} "
            f"| {error:+.1%} |"
        )
    return "\n".join(lines)


def _predicted(row: dict[str, str]) -> tuple[float, float]:
    """Of the forward and the backward, in seconds."""
    cluster = data.load_cluster("dgx-h100", int(row["nodes"]))
    software = data.load_software("megatron-core-2024").training
    model = data.Model(
        hidden_size=int(row["hidden"]),
        vocab_size=1,
        num_layers=1,
        num_heads=1,
        ffn_size=int(row["expert_ffn"]),
        bias=False,
    )
    layout = data.Layout(
        tp=int(row["tp"]),
        dp=int(row["gpus"]) // int(row["tp"]),
        ep=int(row["ep"]),
        etp=int(row["etp"]),
    )
    training = data.Training(
        int(row["micro_batch"]),
        int(row["sequence"]),
        dtype=row["dtype"],  # pyright: ignore
        token_dispatcher=row["dispatcher"],  # pyright: ignore
        software="megatron-core-2024",
        **software,
    )
    experts = MoE(
        num_experts=int(row["experts"]),
        top_k=int(row["topk"]),
        expert_ffn_size=int(row["expert_ffn"]),
        num_groups=int(row["groups"] or 1),
        top_k_groups=int(row["group_topk"] or 1),
    )
    costs = Costs(model, layout, training, cluster, data.load_kernels(cluster))
    forward, backward = (
        _in_a_short_run(run(costs, []), row["dtype"]) for run in (experts.forward, experts.backward)
    )
    return forward, backward


def _in_a_short_run(segments: list[Segment], dtype: str) -> float:
    compute, exposed = split_mean(block([(segments, 1)]))
    compute["gemm"] /= _SUSTAINED[dtype]
    return sum(compute.values()) + sum(exposed.values())
