"""Keys that a job leaves out and that follow from its others: its replicas, nodes and microbatches,
and the kind of its schedule.
"""

import math
from collections.abc import Mapping
from typing import Any


# What follows from a key, so that an override of it replaces these keys in a job's file.
FOLLOW = {
    "world_size": ("layout.dp", "num_nodes", "cluster.num_nodes"),
    "training.global_batch_size": ("schedule.num_microbatches",),
}
DERIVED = ("layout.dp", "cluster.num_nodes", "schedule.num_microbatches", "schedule.kind")


def derived_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `DERIVED` that the table of a job leaves out, with their values: `dp` from
    `world_size`, nodes from the ranks of the layout, microbatches from `global_batch_size`, and the
    usual schedule of so many virtual stages. What does not follow is missing.

    **Raises:**

    A `ValueError` of one sentence if a number must divide another and does not, or if the batch is
    no whole number of at least 1.
    """

    def has(key: str) -> bool:
        return _value(table, key) is not None

    def number(key: str, default: int = 0) -> int:
        value = _value(table, key) if has(key) else default
        # What is no number is refused when the table is converted.
        return value if type(value) is int and value > 0 else 0

    derived: dict[str, Any] = {}
    degrees = [number(f"layout.{name}", 1) for name in ("tp", "pp", "cp")]
    ranks, dp, gpus = math.prod(degrees), number("layout.dp", 1), number("world_size")
    if gpus and ranks and not has("layout.dp"):
        if gpus % ranks:
            raise ValueError(
                f"`world_size` is {gpus}, which tp*pp*cp = {'*'.join(map(str, degrees))} = {ranks} "
                "does not divide; use other degrees, or another number of GPUs."
            )
        dp = derived["layout.dp"] = gpus // ranks
    if isinstance(table.get("cluster"), Mapping) and not has("cluster.num_nodes"):
        per_node = number("cluster.devices_per_node") or 1
        derived["cluster.num_nodes"] = -(-ranks * dp // per_node) or 1
    batch, size = number("training.global_batch_size"), number("training.microbatch_size")
    if has("training.global_batch_size") and not batch:
        value = _value(table, "training.global_batch_size")
        raise ValueError(
            f"`training.global_batch_size` is {value}; give a whole number of at least 1."
        )
    if batch and size and dp and not has("schedule.num_microbatches"):
        together = dp * size
        if batch % together:
            low = batch // together * together
            multiple = " or ".join(str(multiple) for multiple in (low, low + together) if multiple)
            raise ValueError(
                f"`training.global_batch_size` is {batch}, not a multiple of dp*microbatch_size = "
                f"{dp}*{size} = {together}; use {multiple}, or other degrees or microbatches."
            )
        derived["schedule.num_microbatches"] = batch // together
    has_order = "schedule" in table or "schedule.num_microbatches" in derived
    if has_order and not has("schedule.kind"):
        is_plain = number("schedule.virtual_stages", 1) == 1
        derived["schedule.kind"] = "1f1b" if is_plain else "interleaved-1f1b"
    return derived


def put_derived(table: dict[str, Any]) -> None:
    """Adds the derived keys to the table of a job, in place, but not in the tables within it."""
    for key, value in derived_keys(table).items():
        name, _, last = key.partition(".")
        inner = table.get(name, {})
        if isinstance(inner, dict):
            table[name] = {**inner, last: value}


def without_keys(table: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The table of a job without some of its keys."""
    inner = {
        name: {last: value for last, value in part.items() if f"{name}.{last}" not in keys}
        if isinstance(part, dict)
        else part
        for name, part in table.items()
    }
    return {name: part for name, part in inner.items() if name not in keys}


def _value(table: Mapping[str, Any], key: str) -> Any:
    name, _, last = key.partition(".")
    value = table.get(name)
    return value if not last else value.get(last) if isinstance(value, Mapping) else None
