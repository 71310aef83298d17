"""Shipped jobs of well-known runs, beside what was published of them; and the shipped recommender
and models of images, with what is not known of them assumed another way (`assumed.toml`).
"""

import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec

import prism_jax as prism
from prism_jax.data import list_names

from ._means import VARIABILITY
from ._tables import percent, table


# A job of the size of another's, and jobs whose rows `means` has by family.
_NOT = ("llama-3.1-405b-h100-65536", "dit-xl-2-a100-8", "latte-xl-2-a100-8")
_RECOMMENDER, _IMAGES = "dlrm-dcnv2-gb300-64", "flux1-gb300-72"
_UNET, _VIDEO = "stable-diffusion-2-a100-8", "latte-xl-2-a100-8"
_ASSUMED = tomllib.loads(pathlib.Path(__file__).with_name("assumed.toml").read_text())
_FRAMES = 'model.layers=[{modules = ["adaln", "spatial", "mlp"], repeat = 14}]'
# Golden et al. 2023 (arXiv:2312.14385), abstract: of models of images with fused attention, and of
# attention in models of videos.
_PUBLISHED = {"convolutions": "up to 44 %", "attention across frames": "over 60 %"}


def flagship_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each shipped job with a measured mean or median; `folder` is not read."""
    for name in list_names("job"):
        job = prism.load_job(name)
        measured = job.measured and (job.measured.mean_s or job.measured.p50_s)
        if measured and name not in _NOT:
            low, high = prism.expected_error(job).interval()
            mean = prism.predict(job).mean
            row = {"job": name, "measured": measured, "predicted": VARIABILITY * mean}
            yield {**row, "low": low * mean, "high": high * mean}


def flagship_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    cells = []
    for row in rows:
        seconds = [f"{row[name]:.4g}" for name in ("measured", "predicted", "low", "high")]
        error = percent(row["predicted"] / row["measured"] - 1)
        cells.append((row["job"], *seconds[:2], error, " .. ".join(seconds[2:])))
    return table(("job", "published (s)", "predicted (s)", "error", "90 % interval (s)"), cells)


def _as_assumed(name: str) -> dict[str, Any]:
    return {about: prism.load_job(name, keys) for about, keys in _ASSUMED[name].items()}


def _predicted(jobs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    measured = jobs["as shipped"].measured.mean_s
    for about, job in jobs.items():
        seconds = VARIABILITY * prism.predict(job).mean
        yield {"assumed": about, "predicted": seconds, "error": seconds / measured - 1}


def recommender_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each assumption; `folder` is not read."""
    jobs = _as_assumed(_RECOMMENDER)
    shipped = jobs["as shipped"]
    for about, sharding in _ASSUMED["sharding"].items():
        shared = {"sharding": sharding, "shards": None}
        modules = {name: dict(module) for name, module in shipped.model.modules.items()}
        modules["features"]["tables"] = [
            one if "data_parallel" in one.values() else one | shared
            for one in modules["features"]["tables"]
        ]
        model = msgspec.structs.replace(shipped.model, modules=modules)
        jobs[about] = msgspec.structs.replace(shipped, model=model)
    return _predicted(jobs)


def recommender_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    cells = [(r["assumed"], f"{1e3 * r['predicted']:.2f}", percent(r["error"], 0)) for r in rows]
    return table((_RECOMMENDER, "predicted (ms)", "error"), cells)


def image_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """FLUX.1 by what is `assumed`, then shares of time; `folder` is not read."""
    yield from _predicted(_as_assumed(_IMAGES))
    for about, job in _as_assumed(_UNET).items():
        seconds = prism.predict(job).breakdown
        share = seconds["convolution"] / sum(seconds.values())
        yield {"of": "convolutions", "job": f"{_UNET}, {about}", "share": share}
    for about, keys in _ASSUMED[_VIDEO].items():
        within, both = (
            prism.predict(prism.load_job(_VIDEO, [*keys, *more])).breakdown["attention"]
            for more in ((_FRAMES, "model.num_layers=14"), ())
        )
        share = 1 - within / both
        yield {"of": "attention across frames", "job": f"{_VIDEO}, {about}", "share": share}


def image_table(rows: list[dict[str, Any]]) -> str:
    """Two tables in Markdown."""
    assumed, shares = ([row for row in rows if key in row] for key in ("assumed", "of"))
    first = [(r["assumed"], f"{r['predicted']:.3f}", percent(r["error"], 0)) for r in assumed]
    second = [(r["of"], r["job"], f"{100 * r['share']:.0f} %", _PUBLISHED[r["of"]]) for r in shares]
    of_shares = table(("share of", "job", "predicted", "published"), second)
    return f"{table((_IMAGES, 'predicted (s)', 'error'), first)}\n\n{of_shares}"
