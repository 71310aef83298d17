"""The shipped recommender, beside its measured step, with what is not known of it assumed another
way.
"""

import pathlib
from typing import Any

import msgspec

import prism_jax as prism

from ._means import VARIABILITY
from ._tables import percent, table


_JOB = "dlrm-dcnv2-gb300-64"
_SHARDINGS = {
    "shared tables split by columns over all GPUs": "column_wise",
    "shared tables split by rows over all GPUs": "row_wise",
    "each shared table on one GPU": "table_wise",
}
_KEYS: dict[str, tuple[str, ...]] = {
    "as shipped": (),
    "gradients in float32": ("training.gradient_dtype=fp32",),
}
_BUCKETS = "gradients of layers reduced beside the backward of tables"
_KEYS[_BUCKETS] = ("training.gradient_bucket_size=15_000_000",)


def recommender_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each assumption; `folder` is not read."""
    jobs = {about: prism.load_job(_JOB, keys) for about, keys in _KEYS.items()}
    shipped: Any = jobs["as shipped"]
    for about, sharding in _SHARDINGS.items():
        shared = {"sharding": sharding, "shards": None}
        modules = {name: dict(table) for name, table in shipped.model.modules.items()}
        modules["features"]["tables"] = [
            table if "data_parallel" in table.values() else table | shared
            for table in modules["features"]["tables"]
        ]
        model = msgspec.structs.replace(shipped.model, modules=modules)
        jobs[about] = msgspec.structs.replace(shipped, model=model)
    measured = shipped.measured.mean_s
    predicted = {about: VARIABILITY * prism.predict(job).mean for about, job in jobs.items()}
    return [{"assumed": a, "predicted": x, "error": x / measured - 1} for a, x in predicted.items()]


def recommender_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    cells = (
        (row["assumed"], f"{1e3 * row['predicted']:.2f}", percent(row["error"], 0)) for row in rows
    )
    return table((_JOB, "predicted (ms)", "error"), cells)
