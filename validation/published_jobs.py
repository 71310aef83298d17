"""Jobs of published rows.

A row becomes a job by its columns and its source. What a source does not print has the default of
its software, which `published.toml` gives once for all its rows, or the value of the recipe of its
model.
"""

import re
from collections import defaultdict
from typing import Any

import msgspec

from prism_jax import data
from prism_jax.importers._megatron import layers_of_layout

from . import published_models as models
from .rows import WORDS, count, words


_ASSUMED = words("assumed")
_NO_SOURCE = {"table": "", "software": ""}
# What the recipes of these print (recipes/gpt_oss/gpt_oss.py and kimi/kimi_k2.py of megatron-bridge
# 0.3.1); and tokens are dropped with it alone (training/utils/moe_token_drop.py).
_ALL_TO_ALL = ("gptoss", "kimik2")
_NUMBERS = {"one": "1", "two": "2", "three": "3", "four": "4"}
_COMPILED = re.compile(
    "(?<!not )(?<!no )(?<!un)(?<!w/o )(?<!without )compile(?!d? off)|async", re.I
)
_OFFLOADED = re.compile(r"activations of (\d+) layers to the CPU")


def table_of(row: dict[str, str]) -> str:
    table, experts = _source_of(row)["table"], models.has_experts(row)
    if table == "SimuMax, B200":
        kind = "others" if row["cp"] in ("", "1", "1.0") else "context parallel"
        return f"{table}, {'experts' if experts else kind}"
    if table in ("Megatron-Bridge", "dgxc"):
        machine = row["gpu_type"].removeprefix("DGX-")
        return f"{table}, {machine}, {'experts' if experts else 'dense'}"
    if table == "llm-foundry, FSDP":
        return f"{table}, {row['gpu_type']}"
    return table or row["source"].split(" ")[0]


def _source_of(row: dict[str, str]) -> dict[str, Any]:
    return next((one for one in WORDS["sources"] if one["part"] in row["source"]), _NO_SOURCE)


def name_of(row: dict[str, str]) -> str:
    whole = {key: text.removesuffix(".0") for key, text in row.items()}
    degrees = (f"{k}{whole[k]}" for k in ("tp", "pp", "vpp", "cp", "ep", "dp") if row[k])
    name = "{model} {seq} {gpus} x {gpu_type} {dtype}".format_map(defaultdict(str, whole))
    more = (row["release"], row["dispatcher"], row["balance"].split(" ")[0])
    batch = whole.get("global_batch", "")
    return " ".join([name, " ".join(degrees), "batch", batch, *filter(None, more)])


def _dtype(row: dict[str, str]) -> str:
    """Without what is in brackets."""
    return row["dtype"].split(" ")[0].lower()


def _degree(row: dict[str, str], key: str) -> int:
    return count(row, key, 1)


def of_steps(row: dict[str, str], model: data.Model | None = None) -> data.Job:
    """The job of a row, of a model if it is given, or else of the one that the row names."""
    source = _source_of(row)
    stack = source["software"]
    if stack == "megatron-bridge-2025":
        row = _as_recipe(row)
        stack = "megatron-bridge-2026" if row["release"] >= "26.06" else stack
    if "mp mode PURE" in row["note"]:
        stack = "llm-foundry-2023"  # The older release, which does not know DEFAULT.
    if group := source.get("fsdp_gpus", {}).get(models.plain_name(row["model"])):
        row = row | {"note": f"{row['note']}; FSDP over {group} GPUs"}
    row = _as_assumed(row, source.get("assumed"))
    _check(row, stack, is_known=model is not None or models.is_known(row))
    model = model or models.model_of(row)
    degrees = {key: _degree(row, key) for key in ("tp", "pp", "cp", "ep")}
    degrees["dp"] = _degree(row, "gpus") // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    # The recipes of Megatron-Bridge split no experts; Megatron-Core's default is `tp`.
    etp = _degree(row, "etp") if row.get("etp") or "Bridge" in row["source"] else None
    layout = data.Layout(**degrees, etp=etp)
    switches = source.get("switches", {})
    # 8 bits and asynchronous tensor parallelism take torch.compile.
    if not (_COMPILED.search(row["note"]) or WORDS["dtypes"][_dtype(row)] == "fp8"):
        switches = switches | source.get("uncompiled", {})
    keys = _options(row, stack, switches, layout)
    keys |= {"dtype": WORDS["dtypes"][_dtype(row)], "software": stack}
    keys |= _tuned(row, source)
    training = data.Training(_degree(row, "micro_batch"), _degree(row, "seq"), **keys)
    parts = (model, layout, _schedule(row, model, layout), training)
    return models.job_on(*parts, models.cluster_of(row["gpu_type"]), row["note"])


def _options(row: dict[str, str], stack: str, switches: dict[str, Any], layout: data.Layout) -> Any:
    """The keys of `training` that a row states, over those of its stack."""
    note = row["note"]
    options = {**models.switches_of(stack), **switches}
    again = row["recompute"] or options.get("recompute", "none")
    by_op = stack == "torchtitan" and again == "selective"
    options["recompute"] = "by-op" if by_op else WORDS["recompute"].get(again, again)
    if not stack.startswith("llm-foundry"):
        options["sequence_parallel"] = row["seq_parallel"] in ("", "1", "1.0")
    if stack == "torchtitan":
        options["tp_overlap"] = "async" in note.lower()
        options["scaling"] = "row" if "rowwise" in row["dtype"] else "tensor"
        if layout.pp > 1:  # Then it gathers and reduces once a step.
            options |= {"reshard_after_forward": False, "accumulate_gradients": True}
    name, variant = models.plain_name(row["model"]), row["model"].partition("(")[2]
    drops = name.startswith(_ALL_TO_ALL) or variant.startswith("tokendrop")
    if dispatcher := row.get("dispatcher") or "alltoall" * drops:
        options["token_dispatcher"] = dispatcher
    stated = {"fused_grouped_gemm": "fused_experts", "fp8_head": "fp8_head"}
    stated["fp8_attention"] = "fp8_attention"
    options |= {key: row[name] == "1" for name, key in stated.items() if row.get(name)}
    if graphs := row.get("cuda_graph", "").partition(":")[0]:
        options["cuda_graphs"] = WORDS["cuda_graphs"].get(graphs, "none")
    found = row.get("recompute_modules", "").split()
    if found and stack.startswith("maxtext"):
        options |= _made_again(found)
    elif found:
        names = WORDS["recompute_modules"]
        options["recompute_modules"] = tuple(names.get(one, one) for one in found)
    if layers := count(row, "recompute_layers", 0):
        options |= {"recompute_method": "block", "recompute_layers": layers}
    if not stack.startswith("maxtext") and (away := _OFFLOADED.fullmatch(row.get("offload", ""))):
        options |= {"offload": ("activations",), "offload_layers": int(away[1])}
    if "all-to-all" in note:
        options["cp_comm_type"] = "a2a"
    if row["zero"]:
        options["zero"] = WORDS["zero"][row["zero"]]
    # Within how many replicas the optimizer or the parameters are sharded, where a note says it.
    slices = re.search(r"(\w+) slices", note)
    if slices and (number := _NUMBERS.get(slices[1], slices[1])):
        options["optimizer_instances"] = int(number)
    within = re.search(r"zero1=(\d+)|FSDP over (\d+) GPUs|FSDP group (\d+)", note)
    if within and (group := int(next(filter(None, within.groups())))) < layout.dp:
        options["optimizer_instances"] = layout.dp // group
    return options


def _made_again(kept: list[str]) -> dict[str, Any]:
    """What a policy of MaxText makes again for the backward, by the names of what it keeps: without
    projections all of a layer; otherwise norms and MLPs, and attention unless its result is kept.
    """
    if not any(re.search("proj|dots", name) for name in kept):
        return {"recompute": "full"}
    attention = ("fused_attn",) * ("context" not in kept)
    modules = ("layernorm", "mlp", "moe", *attention)
    return {"recompute": "selective", "recompute_modules": modules}


def _tuned(row: dict[str, str], source: dict[str, Any]) -> dict[str, Any]:
    """The keys of fine-tuning: adapters that a row names, which have the rank that its note has or
    that of its source's recipe; what the recipe of its model recomputes; and the assumed lengths of
    the sequences that recipes pack.
    """
    keys: dict[str, Any] = {}
    note, tuned = row["note"], source.get("tuned", {})
    adapted = "LoRA" in note + row["model"]
    if adapted:
        table = tuned.get("adapters", {})
        rank = re.search(r"LoRA (?:dim|rank) (\d+)", note)
        table = {**table, **({"rank": int(rank[1])} if rank else {})}
        if rank and not 0 < int(rank[1]) < 10**9:
            raise ValueError(f"adapters of rank {rank[1]}")
        keys["adapters"] = msgspec.convert(table, data.Adapters)
        again = tuned.get("recompute", {}).get(models.plain_name(row["model"]))
        keys |= {"recompute": again} if again and not row["recompute"] else {}
    if (adapted or "SFT" in note) and tuned.get("packed"):
        keys["packed"] = msgspec.convert(_ASSUMED["packed"], data.Packed)
    return keys


def _as_recipe(row: dict[str, str]) -> dict[str, str]:
    """A row with its release, which may stand in its source alone, and, if its columns do not say
    what its recipe switches on and its model has experts, what the recipes of this release do."""
    named = re.search(r"release (\S+)", row["source"])
    release = row.get("release") or (named[1] if named else "")
    row = row | {"release": release}
    if row.get("cuda_graph") or not models.has_experts(row):
        return row
    texts = {"model": models.plain_name(row["model"]), "machine": row["gpu_type"]}
    texts["dtype"] = _dtype(row)
    for recipe in WORDS["recipes"]:
        fits = all(re.search(recipe[key], text) for key, text in texts.items())
        if fits and release >= recipe["release"]:
            return row | {key: row.get(key) or text for key, text in recipe["is"].items()}
    return row


def _as_assumed(row: dict[str, str], assumed: str | None) -> dict[str, str]:
    """With what a table says that it assumes, and with what the note of a row says."""
    if assumed == "interleaved" and _degree(row, "pp") > 1:
        layers, pp = _degree(row, "layers"), _degree(row, "pp")
        fewest = next((v for v in range(2, layers) if layers % (pp * v) == 0), 2)
        return _filled(row, micro_batch=1, vpp=fewest)
    if assumed == "plain":
        return _filled(row, micro_batch=1, vpp=1)
    if "Megatron-Bridge" in row["source"]:  # It has a column for it, where a dash says none.
        return _filled(row, vpp=1)
    local = re.search(r"local batch (\d+)", row["note"])
    if local and _degree(row, "pp") == 1:  # Without a pipeline torchtitan does not accumulate.
        return _filled(row, micro_batch=int(local[1]))
    if local and "Interleaved" not in row["note"] and "1F1B" in row["note"]:
        # With one it makes as many microbatches as there are stages.
        return _filled(row, micro_batch=max(1, int(local[1]) // _degree(row, "pp")), vpp=1)
    return row


def _filled(row: dict[str, str], **numbers: int) -> dict[str, str]:
    return row | {key: row[key] or str(number) for key, number in numbers.items()}


def _schedule(row: dict[str, str], model: data.Model, layout: data.Layout) -> data.ScheduleConfig:
    stages = layers_of_layout(row["pipeline_layout"]) if row.get("pipeline_layout") else []
    virtual = len(stages) // layout.pp or _degree(row, "vpp")
    pairs = row.get("ep_overlap") == "1" and layout.ep > 1 and (layout.pp == 1 or virtual > 1)
    num_stages, layers = layout.pp * virtual, model.num_layers
    if not stages and num_stages > layers + 2:
        raise ValueError(f"{num_stages} stages, which are more than its layers")
    # Megatron's way to distribute a number of layers that is two short; otherwise the recipes of
    # Megatron-Bridge fill the stages one by one.
    uneven = not stages and num_stages > 1 and layers % num_stages != 0
    counted = uneven and (layers + 2) % num_stages == 0
    if uneven and not counted:
        each = -(-layers // num_stages)
        stages = [max(0, min(each, layers - each * stage)) for stage in range(num_stages)]
    kind = "overlapped-1f1b" if pairs else "interleaved-1f1b" if virtual > 1 else "1f1b"
    microbatches = _degree(row, "global_batch") // (layout.dp * _degree(row, "micro_batch"))
    keys: Any = {"embedding_counts_as_layer": counted, "head_counts_as_layer": counted}
    keys["layers_per_stage"] = tuple(stages) if len(set(stages)) > 1 else None
    return data.ScheduleConfig(kind, microbatches, virtual_stages=virtual, **keys)


def _check(row: dict[str, str], stack: str, is_known: bool) -> None:
    """Raises a `ValueError` for a row that cannot be written as a job."""
    pp, zero = _degree(row, "pp"), row["zero"]
    kinds = ("", "none", "full", "block", "selective", *WORDS["recompute"])
    reasons = {f"sharding that jobs do not have: {zero}": zero and zero not in WORDS["zero"]}
    reasons[f"the layers of {row['model'].partition(' (')[0]} are not known"] = not is_known
    reasons[f"no device {row['gpu_type']}"] = not models.device_of(row["gpu_type"])
    reasons["`dtype` is not given"] = not row["dtype"]
    reasons[f"no dtype {row['dtype']}"] = _dtype(row) not in WORDS["dtypes"]
    reasons["`vpp` is not given"] = pp > 1 and not row["vpp"]
    reasons["the software is not known here"] = not stack
    away = row.get("offload", "")
    # What MaxText sends to the host goes beside the compute.
    unknown = away and not stack.startswith("maxtext") and not _OFFLOADED.fullmatch(away)
    reasons[f"offloading that jobs do not have: {away}"] = unknown
    reasons["a kind of recomputation that jobs do not have"] = row["recompute"] not in kinds
    if reason := next((reason for reason, is_so in reasons.items() if is_so), ""):
        raise ValueError(reason)
    layers = [] if models.has_experts(row) else ["layers"]
    for key in (*layers, "seq", "gpus", "tp", "pp", "micro_batch", "global_batch"):
        count(row, key)
    replicas, left = divmod(_degree(row, "gpus"), _degree(row, "tp") * pp * _degree(row, "cp"))
    if left or _degree(row, "global_batch") % (replicas * _degree(row, "micro_batch")):
        raise ValueError("its numbers do not divide")
