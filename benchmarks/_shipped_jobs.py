"""Shipped jobs of well-known runs, beside what was published of them; and the shipped recommender,
with what is not known of it assumed another way.
"""

import pathlib
from typing import Any

import msgspec

import prism_jax as prism
from prism_jax.data import list_jobs

from ._means import VARIABILITY
from ._tables import percent, table


# A job of the size of another's, and jobs whose rows `means` has by family.
_NOT = ("llama-3.1-405b-h100-65536", "dit-xl-2-a100-8", "latte-xl-2-a100-8")
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


def flagship_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each shipped job with a measured mean or median; `folder` is not read."""
    found = []
    for name in list_jobs():
        job = prism.load_job(name)
        measured = job.measured and (job.measured.mean_s or job.measured.p50_s)
        if measured and name not in _NOT:
            low, high = prism.expected_error(job).interval()
            mean = prism.predict(job).mean
            row = {"job": name, "measured": measured, "predicted": VARIABILITY * mean}
            found.append({**row, "low": low * mean, "high": high * mean})
    return found


def flagship_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("job", "published (s)", "predicted (s)", "error", "90 % interval (s)")
    cells = (
        (
            row["job"],
            *(f"{row[name]:.4g}" for name in ("measured", "predicted")),
            percent(row["predicted"] / row["measured"] - 1),
            f"{row['low']:.4g} .. {row['high']:.4g}",
        )
        for row in rows
    )
    return table(header, cells)


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
