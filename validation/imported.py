"""Published steps of models that are imported from their config.json, in place of the shipped
models that were written by hand: predicted and measured, and whether the interval holds the
measured mean. Rows of models that are not shipped are added.

Rows with other layers than the model's are left out. The layers of some models are counted
otherwise in a file (`jobs/models/gpt-oss-120b.toml` has pairs), so that a layout of their stages
does not fit the imported model; these have a reason.
"""

import functools as ft
import pathlib

import msgspec

import prism_jax as prism
from prism_jax import data
from prism_jax.importers import import_job

from .means import VARIABILITY
from .published import published, rows_of_steps
from .published_jobs import name_of, of_steps
from .published_models import plain_name
from .rows import attempt, job_of, number, predicted, reason_lines
from .tables import Folder, Row, Rows, by, error_of, percent, table


# By the shipped model, its configuration in `../shared/cases/huggingface` or in `configs`.
_CONFIGS = {
    "deepseek-v3": "deepseek-v3.json",
    "gpt-oss-120b": "gpt-oss-120b.json",
    "deepseek-v4-flash": "deepseek-ai--DeepSeek-V4-Flash.json",
    "nemotron-3-super": "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8.json",
    "kimi-k2": "moonshotai--Kimi-K2-Instruct.json",
    "nemotron-3-nano": "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4.json",
    "qwen3-235b-a22b": "Qwen--Qwen3-235B-A22B.json",
    "qwen3-30b-a3b": "qwen3-30b-a3b.json",
}
# Models that are not shipped, by what rows call them.
_FURTHER = {"nemotron3super": "nemotron-3-super", "deepseekv4flash": "deepseek-v4-flash"}
_HERE = pathlib.Path(__file__).with_name("configs")
_LEVEL = 0.9


def imported_rows(folder: Folder) -> Rows:
    """A row for each published step of such a model."""
    for one in published(folder):
        job = one.job
        if job is None or job.model is None or job.model.name not in _CONFIGS:
            continue
        model = _in_place_of(job.model, folder)
        if model is None:
            continue
        by_hand, _ = predicted(job, "")
        job = msgspec.structs.replace(job, model=model)
        yield _row(model.name, one.name, one.seconds, job) | {"by_hand": VARIABILITY * by_hand}
    for row in rows_of_steps(folder):
        name = _FURTHER.get(plain_name(row["model"]))
        seconds = number(row["step_time_s"])
        if name is not None and seconds is not None:
            of_model = ft.partial(of_steps, model=_imported(name, folder))
            job, reason = attempt(job_of, of_model, row)
            yield _row(name, name_of(row), seconds, job, reason)


def _row(model: str, name: str, seconds: float, job: data.Job | None, reason: str = "") -> Row:
    """The figures of a step."""
    row: Row = {"model": model, "name": name, "measured": seconds}
    mean, reason = predicted(job, reason)
    if not mean or job is None or job.cluster is None:
        return row | {"reason": reason}
    low, high = prism.expected_error(job).interval(_LEVEL)
    numbers = {"predicted": VARIABILITY * mean, "low": low * mean, "high": high * mean}
    return row | numbers | {"machine": job.cluster.device.name, "gpus": job.layout.world_size}


@ft.cache
def _imported(name: str, folder: pathlib.Path) -> data.Model:
    config = _CONFIGS[name]
    path = _HERE / config
    if not path.exists():
        path = folder.parent / "cases/huggingface" / config
    model = import_job(path, 8, batch=8).job.model
    assert model is not None
    return msgspec.structs.replace(model, name=name)


def _in_place_of(model: data.Model, folder: pathlib.Path) -> data.Model | None:
    """The imported model with the router and the further layers of a row's; `None` if the row has
    other layers than the shipped model."""
    shipped, replace = data.load_model(model.name), msgspec.structs.replace
    assert shipped.modules is not None
    assert model.modules is not None
    moe = {key: value for key, value in model.modules["moe"].items() if key != "balance"}
    plain = replace(
        model,
        modules=model.modules | {"moe": moe},
        num_mtp_layers=shipped.num_mtp_layers,
    )
    if plain != shipped:
        return None
    new = _imported(model.name, folder)
    assert new.modules is not None
    balance = {
        key: model.modules["moe"][key] for key in ("balance",) if key in model.modules["moe"]
    }
    modules = new.modules | {"moe": new.modules["moe"] | balance}
    return replace(new, modules=modules, num_mtp_layers=model.num_mtp_layers)


def imported_table(rows: list[Row]) -> str:
    """In Markdown."""
    expressed = [row for row in rows if "predicted" in row]
    named = [row | {"of": f"{row['model']}, {row['machine']}"} for row in expressed]
    cells = []
    for name, mine in sorted(by("of", named).items()):
        errors = [error_of(row) for row in mine]
        mean = sum(map(abs, errors)) / len(errors)
        held = sum(row["low"] <= row["measured"] <= row["high"] for row in mine)
        apart = [abs(row["predicted"] / row["by_hand"] - 1) for row in mine if "by_hand" in row]
        largest = max(mine, key=lambda row: row["gpus"])
        step = "{measured:.3g} s; {predicted:.3g} s, {low:.3g} to {high:.3g} s".format_map(largest)
        most = percent(max(apart), form=".1") if apart else "not shipped"
        numbers = (percent(mean, form=".1"), f"{held} of {len(mine)}", most)
        cells.append((name, len(mine), *numbers, f"{largest['gpus']:,}", step))
    header = ("model, machine", "rows", "mean absolute error", "in the 90 % interval")
    header += (
        "most from the shipped model",
        "GPUs of the largest",
        "its step; predicted, interval",
    )
    held = sum(row["low"] <= row["measured"] <= row["high"] for row in expressed)
    text = f"{held} of {len(expressed)} rows are in their interval."
    return "\n".join([table(header, cells), "", text, *reason_lines(rows)])
