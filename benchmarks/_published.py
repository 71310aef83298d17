"""Published steps as jobs: the rows of `published/`, and the systems of `scaling_families.csv`.

A row becomes a job by what its columns and its source say. What a source does not print is what its
software does by default, said once in `_SOFTWARE` for all its rows; no row has a choice of its own.
A row that a job cannot say is kept, with the reason.
"""

import csv
import functools as ft
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from prism_jax import data
from prism_jax.workload import check_split, count_parameters


class Published(msgspec.Struct, frozen=True):
    """A published step.

    **Attributes:**

    - `table`: which of the tables it belongs to.
    - `name`: what it is called in messages.
    - `seconds`: its mean; its median where `median` says so.
    - `job`: the same, or `None`.
    - `reason`: why there is no job.
    - `median`: whether a median was published.
    """

    table: str
    name: str
    seconds: float
    job: data.Job | None = None
    reason: str = ""
    median: bool = False


# Megatron-LM of 2021 and 2022: attention in parts, dropout, and no data-parallel overlap.
_OLD: dict[str, Any] = {"attention": "unfused", "gradient_dtype": "fp16"}
_OLD |= {"overlap_grad_reduce": False, "overlap_param_gather": False, "sequence_parallel": False}
# The collectives of a backward came to run beside its GEMMs after Narayanan et al. 2021. vTrain
# does not say which Megatron-DeepSpeed it measured; it is taken to be a fork of that time.
_NOT_HIDDEN: dict[str, Any] = {"overlap_tp_backward": False}
_NEMO: dict[str, Any] = {"tp_overlap": True, "gradient_dtype": "bf16"}
# The paper interleaves wherever there is a pipeline and prints neither of these.
_ASSUMED = "assumed: micro-batch 1, 2 virtual stages"
# Of each source: part of its text, its table, and what its software does.
_SOFTWARE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cases_april2021", f"Megatron-LM 2021, A100, {_ASSUMED}", {**_OLD, **_NOT_HIDDEN}),
    ("arXiv:2205.05198", "Korthikanti et al. 2022, A100", _OLD),
    # "No overlap features": nothing but what Transformer Engine does by itself.
    (
        "SimuMax",
        "SimuMax, B200",
        {"overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    ("Megatron-Bridge", "Megatron-Bridge", _NEMO),
    ("Megatron-LM examples/llama", "Megatron-LM Llama examples, H100", _NEMO),
)
_CLUSTERS = {
    "A100-80GB": "dgx-a100",
    "B200 1 node": "hgx-b200",
    "DGX-B200": "hgx-b200",
    "DGX-B300": "dgx-b300",
    "DGX-GB200": "gb200-nvl72",
    "DGX-GB300": "gb300-nvl72",
    "DGX-H100": "dgx-h100",
    "H100": "dgx-h100",
    "H100-96GB HBM2e 500W": "hgx-h100-96g",
    "H200": "dgx-h200",
    "TPU v5p": "tpu-v5p",
    "a100_40gb": "dgx-a100-40g",
    "a100_80gb": "dgx-a100",
    "h100_80gb": "dgx-h100",
}
_DTYPES = {"fp16": "fp16", "bf16": "bf16", "amp_bf16": "bf16", "FP8": "fp8"}
_DTYPES["MXFP8"] = "fp8"  # Other scaling factors, the same products.
# What the names of the models say; GPT is what is not named here.
_LLAMA: dict[str, Any] = {"activation": "swiglu", "position": "rotary", "norm": "rmsnorm"}
_LLAMA |= {"bias": False, "tied_embeddings": False}
_WITH_EXPERTS = "deepseek|qwen|oss|kimi|nemotron|mixtral"
_GPT: dict[str, Any] = {"dropout": True}


def published(folder: pathlib.Path) -> Iterator[Published]:
    """All rows of a folder like `../shared/data`."""
    for row in _read(folder / "published" / "measured_steps.csv"):
        seconds = float(row["step_time_s"]) if row["step_time_s"] else None
        yield _expressed(_table_of(row), _steps_name(row), seconds, _of_steps, row)
    for which in ("single", "multi"):
        path = folder / "published" / f"a100_megatron_deepspeed_{which}_node.csv"
        table = f"vTrain, Megatron-DeepSpeed, A100, {which} node"
        for row in _read(path):
            seconds = float(row["iteration time (ms)"]) / 1000
            yield _expressed(table, ", ".join(row.values()), seconds, _of_vtrain, row)
    for row in _read(folder / "mlperf" / "scaling_families.csv"):
        one = _expressed("MLPerf families", row["system"], float(row["p50"]), _of_family, row)
        yield msgspec.structs.replace(one, median=True)


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _expressed(table, name, seconds, job_of, row) -> Published:
    try:
        if seconds is None:
            raise ValueError("no step time")
        job = job_of(row)
        assert job.model is not None
        assert job.training is not None
        check_split(job.model, job.layout, job.schedule, job.training)
    except ValueError as error:
        return Published(table, name, seconds or 0.0, reason=str(error))
    return Published(table, name, seconds, job)


def _table_of(row: dict[str, str]) -> str:
    source = row["source"]
    for part, table, _ in _SOFTWARE:
        if part in source:
            if table == "SimuMax, B200":
                return f"{table}, {'context parallel' if _degree(row, 'cp') > 1 else 'others'}"
            if table == "Megatron-Bridge":
                return f"{table}, {row['gpu_type'].removeprefix('DGX-')}"
            return table
    return source.split(" ")[0]


def _steps_name(row: dict[str, str]) -> str:
    degrees = " ".join(f"{k}{row[k].removesuffix('.0')}" for k in ("tp", "pp", "vpp", "cp", "dp"))
    return f"{row['model']} {row['seq']} {row['gpus']} x {row['gpu_type']} {row['dtype']} {degrees}"


def _dtype(row: dict[str, str]) -> str:
    """Without the recipe of its scaling factors."""
    return row["dtype"].split("-")[0].split(" ")[0]


def _degree(row: dict[str, str], key: str) -> int:
    return int(float(row[key])) if row[key] else 1


def _of_steps(row: dict[str, str]) -> data.Job:
    table, software = next(
        ((t, s) for part, t, s in _SOFTWARE if part in row["source"]), ("", None)
    )
    if _ASSUMED in table and _degree(row, "pp") > 1:
        row = {**row, "micro_batch": row["micro_batch"] or "1", "vpp": row["vpp"] or "2"}
    _check(row, software)
    assert software is not None
    llama = "llama" in row["model"].lower()
    layers = _degree(row, "layers")
    model = data.Model(
        num_layers=layers,
        hidden_size=_degree(row, "hidden"),
        num_heads=_degree(row, "heads"),
        num_kv_heads=_degree(row, "kv_heads"),
        ffn_size=_degree(row, "ffn"),
        vocab_size=_degree(row, "vocab"),
        **(_LLAMA if llama else _GPT),
    )
    layout = data.Layout(
        tp=_degree(row, "tp"),
        pp=_degree(row, "pp"),
        cp=_degree(row, "cp"),
        dp=_degree(row, "gpus") // (_degree(row, "tp") * _degree(row, "pp") * _degree(row, "cp")),
    )
    virtual, size = _degree(row, "vpp"), _degree(row, "micro_batch")
    stages = layout.pp * virtual
    # Megatron's way to deal out a number of layers that is two short.
    counted = stages > 1 and layers % stages != 0 and (layers + 2) % stages == 0
    schedule = data.ScheduleConfig(
        kind="interleaved-1f1b" if virtual > 1 else "1f1b",
        num_microbatches=_degree(row, "global_batch") // (layout.dp * size),
        virtual_stages=virtual,
        embedding_counts_as_layer=counted,
        head_counts_as_layer=counted,
    )
    options = {k: v for k, v in software.items() if k != "sequence_parallel"}
    split = row["seq_parallel"] in ("", "1.0")
    training = data.Training(
        microbatch_size=size,
        sequence_length=_degree(row, "seq"),
        dtype=_DTYPES[_dtype(row)],  # pyright: ignore
        recompute=row["recompute"] or "none",  # pyright: ignore
        zero=int(row["zero"]),  # pyright: ignore
        sequence_parallel=split,
        **options,
    )
    return _job(model, layout, schedule, training, _CLUSTERS[row["gpu_type"]])


def _check(row: dict[str, str], software: dict[str, Any] | None) -> None:
    """Raises a `ValueError` for what a job cannot say."""
    if row["zero"] not in ("0", "1"):
        raise ValueError("parameters or gradients are sharded")
    if _degree(row, "ep") > 1 or re.search(_WITH_EXPERTS, row["model"].lower()):
        raise ValueError("experts")
    if row["gpu_type"] not in _CLUSTERS:
        raise ValueError(f"no device {row['gpu_type']}")
    if _dtype(row) not in _DTYPES:
        raise ValueError(f"no dtype {row['dtype']}")
    if _degree(row, "pp") > 1 and not row["vpp"]:
        raise ValueError("`vpp` is not told")
    if "SFT" in row["note"] or "LoRA" in row["note"]:
        raise ValueError("packed sequences of unknown lengths")
    for key in ("layers", "seq", "gpus", "tp", "pp", "micro_batch", "global_batch"):
        if not row[key]:
            raise ValueError(f"`{key}` is not told")
    if software is None:
        raise ValueError("what its software does is not known here")
    if row["recompute"] not in ("", "none", "selective", "full"):
        raise ValueError("recomputes something else")
    ranks = _degree(row, "tp") * _degree(row, "pp") * _degree(row, "cp")
    if _degree(row, "gpus") % ranks or _degree(row, "global_batch") % (
        _degree(row, "gpus") // ranks * _degree(row, "micro_batch")
    ):
        raise ValueError("its numbers do not divide")


def _of_vtrain(row: dict[str, str]) -> data.Job:
    def number(key: str) -> int:
        return int(row[key])

    tp, pp = number("tensor parallelism"), number("pipeline parallelism")
    dp, size = number("data parallelism"), number("micro batch")
    hidden = number("hidden size")
    model = data.Model(
        num_layers=number("# layers"),
        hidden_size=hidden,
        num_heads=number("attention heads"),
        ffn_size=4 * hidden,
        vocab_size=51200,
        max_positions=number("sequence length"),
        **_GPT,
    )
    training = data.Training(
        microbatch_size=size,
        sequence_length=number("sequence length"),
        dtype="fp16",
        recompute="full",
        zero=0,
        **_OLD,
        **_NOT_HIDDEN,
    )
    schedule = data.ScheduleConfig("1f1b", number("global batch") // (dp * size))
    return _job(model, data.Layout(tp=tp, pp=pp, dp=dp), schedule, training, "dgx-a100")


def _of_family(row: dict[str, str]) -> data.Job:
    from ._scales import overrides

    system = {k: int(row[k]) for k in ("microbatches", "dp", "gbs")} | {"family": row["family"]}
    return data.load_job("gpt3-175b-h100-4096", overrides(system))


_shipped = ft.cache(data.load_cluster)  # Read once for all rows of a size.
_kernels = ft.cache(lambda cluster, nodes: data.load_kernels(_shipped(cluster, nodes)))


def _job(model, layout, schedule, training, cluster: str) -> data.Job:
    nodes = -(-layout.world_size // _shipped(cluster, 1).devices_per_node)
    machine, kernels = _shipped(cluster, nodes), _kernels(cluster, nodes)
    _check_memory(model, layout, machine)
    parts = {"model": model, "cluster": machine, "training": training, "kernels": kernels}
    return data.Job(layout, schedule, name="published", **parts)


def _check_memory(model: data.Model, layout: data.Layout, machine: data.Cluster) -> None:
    """Refuses what only sharded parameters can have run: two bytes of each parameter and of its
    gradient alone are more than a device holds."""
    held = 4 * count_parameters(model) / (layout.tp * layout.pp)
    if held > machine.device.memory_bytes:
        raise ValueError("parameters must have been sharded, for they do not fit")
