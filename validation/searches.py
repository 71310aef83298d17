"""Layouts that searches tried on 8 and 16 A100 of 40 GB, some of which failed: how they rank by
predicted time, and whether they fit (`steps/layouts_a100.csv`).
"""

import math
import pathlib
from collections import Counter, defaultdict
from typing import Any

import msgspec
import numpy as np
from scipy.stats import kendalltau

from prism_jax import data
from prism_jax.data import make_job
from prism_jax.importers._documents import document
from prism_jax.importers._frameworks import megatron_reader
from prism_jax.importers._megatron import read_megatron
from prism_jax.prediction import memory, predict

from .published_jobs import of_steps
from .rows import attempt, count, job_of, number, read
from .tables import Folder, Row, by, percent, table


# What ended a row, where it was the machine or the launch.
NOT_OF_MEMORY = ("scheduler", "no GPU visible")
ENDED = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
_NOWHERE = pathlib.Path("a row")
_CLUSTER = "perlmutter-40g-tcp"
# PyTorch's profiler is on in the steps that were timed. With it, the host takes 69 and 58 us to
# launch a kernel of a forward and of a backward, without it 34 and 29 (`plain_h200/`).
_PROFILED = 2.0
# What the searches train, as flags of Megatron-LM (ccl-bench@1d257f0, agent/megatron_llama8b/
# scripts/run.sh and run_dsv2lite.sh), and for torchtitan in the columns of published steps. Which
# tokenizer both scripts have is not said. Its vocabulary is as large as that of GPT-2: first and
# last stage add the gradients of a tied embedding, which takes 0.2, 0.35 and 0.7 s with tp 4, 2 and
# 1 at 1.2 GB/s. With the 128,256 words of Llama 3.1 it would take 0.44, 0.9 and 1.75 s, more than
# some of the steps, and layouts that ran would not fit.
_COMMON = "--bf16 --swiglu --position-embedding-type rope --no-gradient-accumulation-fusion "
_COMMON += "--vocab-size 50257 "
_COMMANDS = {
    "Llama-3.1-8B": _COMMON
    + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8",
    "DeepSeek-V2-Lite": _COMMON
    + "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
    "--kv-channels 16 --normalization RMSNorm --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights --sequence-parallel --make-vocab-size-divisible-by 3200 "
    "--multi-latent-attention --kv-lora-rank 512 --moe-layer-freq ([0]+[1]*26) --num-experts 64 "
    "--moe-ffn-hidden-size 1408 --moe-router-topk 6 --moe-shared-expert-intermediate-size 2816 "
    "--moe-token-dispatcher-type alltoall",
}
# A table's rows are of other scripts (trace_collection/llama_3.1_8b-megatron_lm-*/run.sh).
_TABLE = "--untie-embeddings-and-output-weights --disable-bias-linear --use-distributed-optimizer "
_TABLE += "--recompute-granularity full --recompute-method uniform --recompute-num-layers 32 "
_TABLE += "--micro-batch-size 1 --vocab-size 128256"
_LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
_COUNTS = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}
_COUNTS |= {"micro_batch": "micro-batch-size", "global_batch": "global-batch-size"}
_COUNTS |= {"seq": "seq-length", "ep": "expert-model-parallel-size"}


def search_rows(folder: Folder) -> dict[str, Any]:
    """The layouts that searches tried, below a folder like `../shared/data`.

    **Returns:**

    `rows` have a `table`, the search; a `name`; the `measured` and `predicted` seconds a sequence,
    of which the former is `None` where nothing ran; whether the run `ran`; and whether the layout
    `fits`. `left_out` counts the other rows by reason.
    """
    rows, left_out = [], Counter()
    for row in read(folder / "steps" / "layouts_a100.csv"):
        ran = ENDED.get(row["ran"].lower())
        fault = row["configuration_fault"] or row["failure"]
        if ran is None:
            left_out["it is not said whether it ran"] += 1
            continue
        if not ran and (row["configuration_fault"] or fault in NOT_OF_MEMORY):
            left_out[fault] += 1
            continue
        figures, reason = attempt(_predicted, row)
        if not figures:
            left_out[reason] += 1
            continue
        rate = number(row["sequences_per_s"]) if ran else None
        measured = {"measured": 1 / rate if rate else None, "ran": ran}
        rows.append({"table": row["search"], "name": name_of_layout(row)} | measured | figures)
    return {"rows": rows, "left_out": dict(left_out)}


def _predicted(row: dict[str, str]) -> Row:
    """Seconds a sequence of a row's layout, to three digits, for repeats differ by 1 to 7 %; and
    whether it fits."""
    job = job_of(layout_of, row)
    seconds = float(f"{predict(job).mean / count(row, 'global_batch'):.3g}")
    return {"predicted": seconds, "fits": memory(job).fits}


def name_of_layout(row: dict[str, str]) -> str:
    degrees = " ".join(f"{key}{row[key]}" for key in ("tp", "pp", "dp", "ep"))
    more = " ".join(filter(None, (row["recompute"], "compiled" * _is_compiled(row))))
    return f"{row['framework']} {degrees} batch {row['micro_batch']} {more}"


def _is_compiled(row: dict[str, str]) -> bool:
    return bool(ENDED.get(row["compile"].lower()))


def search_table(result: dict[str, Any]) -> str:
    """In Markdown: a line for each search and their mean; and the rows that were left out."""
    lines, taus, regrets = [], [], []
    for name, rows in by("table", result["rows"]).items():
        timed = [row for row in rows if row["measured"]]
        figures = ("", "")
        if len({row["measured"] for row in timed}) > 1:
            measured, predicted = ([row[key] for row in timed] for key in ("measured", "predicted"))
            ranks: Any = kendalltau(measured, predicted)
            taus.append(ranks.statistic)
            regrets.append(measured[int(np.argmin(predicted))] / min(measured) - 1)
            figures = f"{taus[-1]:.2f}", percent(regrets[-1])
        right = sum(row["fits"] == row["ran"] for row in rows)
        refused = sum(row["ran"] and not row["fits"] for row in rows)
        lines.append((name, len(rows), len(timed), *figures, right, refused))
    rows = result["rows"]
    right = sum(row["fits"] == row["ran"] for row in rows) / len(rows) if rows else math.nan
    middle = f"{np.mean(taus or [math.nan]):.2f}", percent(float(np.mean(regrets or [math.nan])))
    lines.append(("mean", len(rows), "", *middle, percent(right), ""))
    header = ("search", "rows", "ran", "Kendall's tau", "regret of the first choice")
    header += ("memory right", "refused that ran")
    left_out = [f"- {n}: {reason}" for reason, n in result["left_out"].items()]
    return "\n".join([table(header, lines), "", "Left out:", "", *left_out])


def layout_of(row: dict[str, str]) -> data.Job:
    """The job of a row of `layouts_a100.csv`."""
    command = next((flags for name, flags in _COMMANDS.items() if name in row["model"]), "")
    if row["framework"] == "Megatron-LM" and command:
        return _of_megatron(row, command)
    batch = row["micro_batch"]
    if not batch:  # Without a pipeline it does not accumulate; with one, microbatches are of one.
        batch = count(row, "global_batch") // count(row, "dp") if count(row, "pp") == 1 else 1
    known = {key: str(value) for key, value in _LLAMA.items() if "Llama-3.1-8B" in row["model"]}
    known |= {"source": row["framework"], "model": row["model"], "cp": "1", "vpp": "1"}
    keys = ("gpus", "tp", "pp", "ep", "global_batch", "seq", "zero", "recompute")
    known |= {key: row[key] for key in keys}
    known |= {"dtype": "bf16", "gpu_type": row["device"], "micro_batch": str(batch)}
    known["note"] = "compile" * _is_compiled(row)
    return _on_cluster(of_steps(defaultdict(str, known)))


def _of_megatron(row: dict[str, str], command: str) -> data.Job:
    arguments = dict(document("job.sh", command).keys)
    if not row["micro_batch"]:
        arguments |= document("job.sh", _TABLE).keys
    stated = {name: key for key, name in _COUNTS.items() if row[key]}
    arguments |= {name: count(row, key) for name, key in stated.items()}
    arguments["max-position-embeddings"] = arguments["seq-length"]
    if row["recompute"]:
        arguments["recompute-granularity"] = row["recompute"]
    if row["zero"] not in ("", "0", "0.0"):
        arguments["use-distributed-optimizer"] = True
    gpus = count(row, "gpus")
    raw = read_megatron(megatron_reader(arguments), gpus)
    raw["training"]["software"] = "megatron-core-2024"
    return _on_cluster(make_job(raw | {"cluster": _CLUSTER, "num_nodes": -(-gpus // 4)}, _NOWHERE))


def _on_cluster(job: data.Job) -> data.Job:
    """A job there, while it is profiled."""
    training: Any = job.training
    names = ("host_module_s", "host_experts_s", "host_forward_s", "host_backward_s")
    slower = {name: _PROFILED * getattr(training, name) for name in names}
    cluster = data.load_cluster(_CLUSTER, -(-job.layout.world_size // 4))
    keys: Any = {"cluster": cluster, "kernels": data.load_kernels(cluster)}
    keys["training"] = msgspec.structs.replace(training, **slower)
    return msgspec.structs.replace(job, **keys)
