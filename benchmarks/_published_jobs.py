"""Jobs of published rows.

A row becomes a job by its columns and its source. What a source does not print has the default of
its software, which `published.toml` gives once for all its rows, or the value of the recipe of its
model.
"""

import re
from typing import Any

from prism_jax import data
from prism_jax.importers._megatron import layers_of_layout

from . import _published_models as models
from ._rows import WORDS, count


_NO_SOURCE = {"table": "", "software": ""}
# What the recipes of these print (recipes/gpt_oss/gpt_oss.py and kimi/kimi_k2.py of megatron-bridge
# 0.3.1); and tokens are dropped with it alone (training/utils/moe_token_drop.py).
_ALL_TO_ALL = ("gptoss", "kimik2")


def table_of(row: dict[str, str]) -> str:
    table = _source_of(row)["table"]
    if table == "SimuMax, B200":
        kind = "others" if row["cp"] in ("", "1", "1.0") else "context parallel"
        return f"{table}, {'experts' if models.has_experts(row) else kind}"
    if table in ("Megatron-Bridge", "dgxc"):
        kind = "experts" if models.has_experts(row) else "dense"
        return f"{table}, {row['gpu_type'].removeprefix('DGX-')}, {kind}"
    if table == "llm-foundry, FSDP":
        return f"{table}, {row['gpu_type']}"
    return table or row["source"].split(" ")[0]


def _source_of(row: dict[str, str]) -> dict[str, Any]:
    return next((one for one in WORDS["sources"] if one["part"] in row["source"]), _NO_SOURCE)


def name_of(row: dict[str, str]) -> str:
    degrees = " ".join(
        f"{k}{row[k].removesuffix('.0')}" for k in ("tp", "pp", "vpp", "cp", "ep", "dp") if row[k]
    )
    batch = row["global_batch"].removesuffix(".0")
    name = f"{row['model']} {row['seq'].removesuffix('.0')} {row['gpus'].removesuffix('.0')} x "
    name += f"{row['gpu_type']} {row['dtype']} {degrees} batch {batch}"
    more = (row.get("release", ""), row.get("dispatcher", ""), row.get("balance", "").split(" ")[0])
    return " ".join([name, *filter(None, more)])


def _dtype(row: dict[str, str]) -> str:
    """Without what is in brackets."""
    return row["dtype"].split(" ")[0].lower()


def _degree(row: dict[str, str], key: str) -> int:
    return count(row, key, 1)


def of_steps(row: dict[str, str]) -> data.Job:
    source = _source_of(row)
    stack = source["software"]
    if stack == "megatron-bridge-2025" and row.get("release", "") >= "26.06":
        stack = "megatron-bridge-2026"
    if "mp mode PURE" in row["note"]:
        stack = "llm-foundry-2023"  # The older release, which does not know DEFAULT.
    row = _as_assumed(row, source.get("assumed"))
    _check(row, stack)
    model = models.model_of(row)
    degrees = {key: _degree(row, key) for key in ("tp", "pp", "cp", "ep")}
    degrees["dp"] = _degree(row, "gpus") // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    # The recipes of Megatron-Bridge split no experts; Megatron-Core's default is `tp`.
    etp = _degree(row, "etp") if row.get("etp") or "Bridge" in row["source"] else None
    layout = data.Layout(**degrees, etp=etp)
    training = data.Training(
        microbatch_size=_degree(row, "micro_batch"),
        sequence_length=_degree(row, "seq"),
        dtype=WORDS["dtypes"][_dtype(row)],
        software=stack,
        **_options(row, stack, source.get("switches", {}), layout),
    )
    cluster = models.cluster_of(row["gpu_type"])
    return models.job_on(
        model, layout, _schedule(row, model, layout), training, cluster, row["note"]
    )


def _options(
    row: dict[str, str], stack: str, switches: dict[str, Any], layout: data.Layout
) -> dict[str, Any]:
    """The keys of `training` that a row states, over those of its stack."""
    note = row["note"]
    options = {**models.switches_of(stack), **switches}
    options["recompute"] = row["recompute"] or options.get("recompute", "none")
    if not stack.startswith("llm-foundry"):
        options["sequence_parallel"] = row["seq_parallel"] in ("", "1", "1.0")
    if stack == "torchtitan":
        options["tp_overlap"] = "async" in note.lower()
        options["scaling"] = "row" if "rowwise" in row["dtype"] else "tensor"
        if layout.pp > 1:  # Then it gathers and reduces once a step.
            options |= {"reshard_after_forward": False, "accumulate_gradients": True}
    name, variant = models.plain_name(row["model"]), row["model"].partition("(")[2]
    if row.get("dispatcher"):
        options["token_dispatcher"] = row["dispatcher"]
    elif name.startswith(_ALL_TO_ALL) or variant.startswith("tokendrop"):
        options["token_dispatcher"] = "alltoall"
    stated = {"fused_grouped_gemm": "fused_experts"}
    for name in ("fused_grouped_gemm", "fp8_attention", "fp8_head"):
        if row.get(name):
            options[stated.get(name, name)] = row[name] == "1"
    if graphs := row.get("cuda_graph", "").partition(":")[0]:
        options["cuda_graphs"] = WORDS["cuda_graphs"].get(graphs, "none")
    if row.get("recompute_modules"):
        found, names = row["recompute_modules"].split(), WORDS["recompute_modules"]
        options["recompute_modules"] = tuple(names.get(one, one) for one in found)
    if row.get("recompute_layers"):
        layers = _degree(row, "recompute_layers")
        options |= {"recompute_method": "block", "recompute_layers": layers}
    if "all-to-all" in note:
        options["cp_comm_type"] = "a2a"
    if row["zero"]:
        options["zero"] = WORDS["zero"][row["zero"]]
    # Within how many replicas the optimizer or the parameters are sharded, where a note says it.
    within = re.search(r"zero1=(\d+)|FSDP over (\d+) GPUs|FSDP group (\d+)", note)
    if within and (group := int(next(filter(None, within.groups())))) < layout.dp:
        options["optimizer_instances"] = layout.dp // group
    return options


def _as_assumed(row: dict[str, str], assumed: str | None) -> dict[str, str]:
    """With what a table says that it assumes, and with what the note of a row says."""
    if assumed == "interleaved" and _degree(row, "pp") > 1:
        layers, pp = _degree(row, "layers"), _degree(row, "pp")
        fewest = next((v for v in range(2, layers) if layers % (pp * v) == 0), 2)
        return row | {"micro_batch": row["micro_batch"] or "1", "vpp": row["vpp"] or str(fewest)}
    if assumed == "plain":
        return row | {"micro_batch": row["micro_batch"] or "1", "vpp": row["vpp"] or "1"}
    if "Megatron-Bridge" in row["source"]:  # It has a column for it, where a dash says none.
        return row | {"vpp": row["vpp"] or "1"}
    local = re.search(r"local batch (\d+)", row["note"])
    if local and _degree(row, "pp") == 1:  # Without a pipeline torchtitan does not accumulate.
        return row | {"micro_batch": row["micro_batch"] or local[1]}
    if local and "Interleaved" not in row["note"] and "1F1B" in row["note"]:
        # With one it makes as many microbatches as there are stages.
        size = max(1, int(local[1]) // _degree(row, "pp"))
        return row | {"micro_batch": row["micro_batch"] or str(size), "vpp": row["vpp"] or "1"}
    return row


def _schedule(row: dict[str, str], model: data.Model, layout: data.Layout) -> data.ScheduleConfig:
    stages = layers_of_layout(row["pipeline_layout"]) if row.get("pipeline_layout") else []
    virtual = len(stages) // layout.pp or _degree(row, "vpp")
    pairs = row.get("ep_overlap") == "1" and layout.ep > 1 and (layout.pp == 1 or virtual > 1)
    num_stages, layers = layout.pp * virtual, model.num_layers
    if not stages and num_stages > layers + 2:
        raise ValueError(f"{num_stages} stages, which are more than its layers")
    # Megatron's way to distribute a number of layers that is two short; otherwise the recipes of
    # Megatron-Bridge fill the stages one by one.
    uneven = num_stages > 1 and layers % num_stages != 0
    counted = uneven and not stages and (layers + 2) % num_stages == 0
    if not stages and uneven and not counted:
        each = -(-layers // num_stages)
        stages = [max(0, min(each, layers - each * stage)) for stage in range(num_stages)]
    return data.ScheduleConfig(
        kind="overlapped-1f1b" if pairs else "interleaved-1f1b" if virtual > 1 else "1f1b",
        num_microbatches=_degree(row, "global_batch") // (layout.dp * _degree(row, "micro_batch")),
        virtual_stages=virtual,
        embedding_counts_as_layer=counted,
        head_counts_as_layer=counted,
        layers_per_stage=tuple(stages) if len(set(stages)) > 1 else None,
    )


def _check(row: dict[str, str], stack: str) -> None:
    """Raises a `ValueError` for a row that cannot be written as a job."""
    recompute, pp = row["recompute"], _degree(row, "pp")
    kinds = ("", "none", "full", "block")
    kinds = kinds if stack == "torchtitan" else (*kinds, "selective")
    sharding = f"sharding that jobs do not have: {row['zero']}"
    reasons = {
        sharding: row["zero"] and row["zero"] not in WORDS["zero"],
        f"the layers of {row['model'].partition(' (')[0]} are not known": not models.is_known(row),
        f"no device {row['gpu_type']}": not models.device_of(row["gpu_type"]),
        f"no dtype {row['dtype']}": _dtype(row) not in WORDS["dtypes"],
        "`vpp` is not given": pp > 1 and not row["vpp"],
        "adapters of low rank (LoRA)": "LoRA" in row["note"] or "LoRA" in row["model"],
        "packed sequences of unknown lengths": "SFT" in row["note"],
        "the software is not known here": not stack,
        # That of torchtitan recomputes every other matrix multiplication.
        "a kind of recomputation that jobs do not have": recompute not in kinds,
    }
    if reason := next((reason for reason, is_so in reasons.items() if is_so), ""):
        raise ValueError(reason)
    columns = () if models.has_experts(row) else ("layers",)
    for key in (*columns, "seq", "gpus", "tp", "pp", "micro_batch", "global_batch"):
        count(row, key)
    ranks = _degree(row, "tp") * pp * _degree(row, "cp")
    replicas, left = divmod(_degree(row, "gpus"), ranks)
    if left or _degree(row, "global_batch") % (replicas * _degree(row, "micro_batch")):
        raise ValueError("its numbers do not divide")
