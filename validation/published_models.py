"""Models and machines of published rows, from the columns and the names of both."""

import functools as ft
import re
from typing import Any

import msgspec

from prism_jax import data
from prism_jax.workload import count_parameters

from .rows import WORDS, count


# The columns of a layer of experts.
EXPERTS = {"experts": "num_experts", "topk": "top_k", "expert_ffn": "expert_ffn_size"}


def plain_name(name: str) -> str:
    """A name without case, spaces, signs, and what is in brackets."""
    return re.sub("[^a-z0-9]", "", name.partition("(")[0].lower())


def has_experts(row: dict[str, str]) -> bool:
    """Whether a row's model is one with experts, by its columns or by its name."""
    name = plain_name(row["model"])
    named = _is_named("experts", name) and "distill" not in name
    return named or row.get("experts", "") not in ("", "0", "0.0", "1", "1.0")


def _shipped_name(row: dict[str, str]) -> str:
    name, releases = plain_name(row["model"]), WORDS["names"]["releases"]
    return next((m for p, m in WORDS["shipped"].items() if re.fullmatch(p + releases, name)), "")


def _is_named(kind: str, name: str) -> bool:
    return any(re.search(part, name) for part in WORDS["names"][kind])


def is_known(row: dict[str, str]) -> bool:
    """Whether its layers are those of a shipped model, or in its columns."""
    other = _is_named("others", plain_name(row["model"]))
    described = not other and (bool(row.get("experts")) or not has_experts(row))
    return described or bool(_shipped_name(row))


_shipped_model = ft.cache(data.load_model)


def model_of(row: dict[str, str]) -> data.Model:
    """The model of a row.

    **Raises:**

    A `ValueError` if a column that says a size is missing or no number.
    """
    shipped = _shipped_name(row)
    model = _variant(_shipped_model(shipped), row) if shipped else _described(row)
    if not model.modules or not row.get("balance", "").startswith("dropless"):
        return model
    moe = {**model.modules["moe"], "balance": "dropless"}  # A router as it is.
    return msgspec.structs.replace(model, modules={**model.modules, "moe": moe})


def _described(row: dict[str, str]) -> data.Model:
    """A model by its columns."""
    number, name = ft.partial(count, row), plain_name(row["model"])
    kind = next((one for one in WORDS["layers"] if re.search(one["name"], name)), {})
    keys = (WORDS["modern"] if kind.get("modern", True) else {}) | kind.get("keys", {})
    sizes = {key: number(column) for column, key in WORDS["sizes"].items()}
    positions = number("seq") if kind.get("positions") == "seq" else 2048
    layers = _layers_with_experts(number) if has_experts(row) else {}
    if windows := kind.get("windows"):
        layers = _layers_with_windows(number("layers"), *windows)
    head_size = number("head_dim", 0, 0) or None
    return data.Model(**sizes, head_size=head_size, max_positions=positions, **keys, **layers)


def _layers_with_experts(number: Any) -> dict[str, Any]:
    dense = number("dense_layers", 0, 0)
    kinds = ((dense, "mlp"), (number("layers") - dense, "moe"))
    layers = (data.Layer(("attention", last), count) for count, last in kinds if count)
    moe = {key: number(name) for name, key in EXPERTS.items()}
    if shared := number("shared_ffn", 0, 0):
        moe["shared_ffn_size"] = shared
    return {"layers": tuple(layers), "modules": {"moe": moe}}


def _layers_with_windows(layers: int, window: int, local: int) -> dict[str, Any]:
    """So many layers with a window before each without, and those that are left."""
    pairs = [("local", "mlp")] * local + [("attention", "mlp")]
    each = [data.Layer(pairs[i % len(pairs)], 1) for i in range(layers)]
    return {"layers": tuple(each), "modules": {"local": {"kind": "attention", "window": window}}}


def _variant(model: Any, row: dict[str, str]) -> data.Model:
    """A shipped model, as the brackets after its name and its columns say."""
    variant = row["model"].partition("(")[2]
    if "oss20b" in plain_name(row["model"]):  # It has fewer layers and experts.
        row = {"layers": "24", "experts": "32"} | {key: text for key, text in row.items() if text}
    bracket = re.match(r"(\d+) layers", variant)
    given = count(row, "layers", int(bracket[1]) if bracket else 0, 0)
    model = _with_columns(model, row)
    whole = sum(_counted(layer) * layer.repeat for layer in model.layers)
    if bracket or given not in (0, whole):
        dense = count(row, "dense_layers", 1 if bracket else model.layers[0].repeat, 0)
        model = _first_layers(model, given, dense)
    layout = row.get("pipeline_layout", "")
    without = variant.startswith("w/o MTP") or (layout and "m" not in layout)
    without = without or bracket or re.search("zoo|Automodel", row["source"])
    return msgspec.structs.replace(model, num_mtp_layers=0) if without else model


def _with_columns(model: Any, row: dict[str, str]) -> Any:
    """A model with the sizes that a row has, which hold over those of its name."""

    def given(columns: dict[str, str]) -> dict[str, int]:
        return {key: n for column, key in columns.items() if (n := count(row, column, 0, 0))}

    # These do not hold over a model with layers of its own.
    others = {"layers", "ffn", *["kv_heads"] * (model.num_kv_heads is None)}
    sizes = {column: key for column, key in WORDS["sizes"].items() if column not in others}
    modules = {**model.modules, "moe": model.modules["moe"] | given(EXPERTS)}
    return msgspec.structs.replace(model, modules=modules, **given(sizes))


def _counted(layer: data.Layer) -> int:
    """The layers that an entry of a model counts as: that of gpt-oss is a pair of them, and with
    Mamba-2 each module is one."""
    mixers = [name for name in layer.modules if name in ("attention", "mla", "local")]
    return len(layer.modules) if "mamba" in layer.modules else len(mixers)


def _first_layers(model: Any, number: int, num_dense: int) -> data.Model:
    """So many layers of a model, of which so many are dense if its first ones are.

    The rows of SimuMax do not say how many of four layers are dense; the peaks of memory that their
    notes print do. `prism.memory` of the same jobs is within 2 % of each of them with one dense
    layer, and where there is no pipeline 13 % above with none and 16 % below with two.
    """
    *first, last = model.layers
    repeats = [num_dense] * len(first)
    left, odd = divmod(number - sum(repeats), _counted(last))
    if len(first) > 1 or odd or left < 1:
        raise ValueError(f"{number} layers are not some of its model")
    repeats, replace = [*repeats, left], msgspec.structs.replace
    layers = (replace(one, repeat=n) for one, n in zip(model.layers, repeats, strict=True) if n)
    return replace(model, layers=tuple(layers), num_layers=sum(repeats))


def device_of(name: str) -> str:
    """The device in `hardware/devices` of a machine; empty if it is not known."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return next((found for part, found in WORDS["devices"].items() if re.search(part, letters)), "")


def cluster_of(name: str) -> str:
    """The machine in `hardware/clusters` with a device that a name says.

    **Raises:**

    A `ValueError` if its device is not known.
    """
    if not (device := device_of(name)):
        raise ValueError(f"no device {name}")
    return WORDS["clusters"][device]


switches_of = ft.cache(lambda stack: data.load_software(stack).training)
_shipped_cluster = ft.cache(data.load_cluster)  # Read once for all rows of a size.
_kernels = ft.cache(lambda cluster, nodes: data.load_kernels(_shipped_cluster(cluster, nodes)))


def job_on(model, layout, schedule, training, cluster: str, note: str = "") -> data.Job:
    nodes = -(-layout.world_size // _shipped_cluster(cluster, 1).devices_per_node)
    machine, kernels = _shipped_cluster(cluster, nodes), _kernels(cluster, nodes)
    adapters = re.search(r"(\d+) x (\d+) Gb RoCE a node", note)
    if adapters and len(machine.links) > 1:
        bandwidth = int(adapters[1]) * int(adapters[2]) / 8 * 1e9 / machine.devices_per_node
        *inner, last = machine.links
        last = msgspec.structs.replace(last, bandwidth_bytes_per_s=bandwidth)
        machine = msgspec.structs.replace(machine, links=(*inner, last))
    if training.zero < 2 and layout.ep == 1:
        _check_memory(model, layout, machine, 4 if training.adapters is None else 2)
    about = {"name": "published", "model": model, "training": training}
    return data.Job(layout, schedule, cluster=machine, kernels=kernels, **about)


def _check_memory(
    model: data.Model, layout: data.Layout, machine: data.Cluster, num_bytes: int
) -> None:
    """Refuses what only sharded parameters can have run: two bytes of each parameter and, where it
    is trained, of its gradient alone are more than a device holds."""
    held = num_bytes * count_parameters(model) / (layout.tp * layout.pp)
    if held > machine.device.memory_bytes:
        raise ValueError("parameters must have been sharded, for they do not fit")
