"""Published steps as jobs: the rows of `published/` and `steps/`, and systems of MLPerf Training.

A row that cannot be written as a job is kept, with the reason.
"""

import functools as ft
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from prism_jax import data

from ._families import job_of_family
from ._published_jobs import name_of, of_steps, table_of
from ._published_models import GPT, has_experts, job_on, switches_of
from ._rows import WORDS, attempt, count, job_of, number, read


FAMILIES = "MLPerf families"
# What the software that all of them use does; the files do not set it.
_SET = {"source": "MLPerf v6.0", "release": "26.06"}
# Columns that have the same name here and there, or another one.
_COLUMNS = {name: name for name in ("gpus", "tp", "pp", "cp", "ep", "pipeline_layout")}
_COLUMNS |= {"vpp": "vp", "global_batch": "global_batch", "seq": "sequence", "model": "bench"}


class Published(msgspec.Struct, frozen=True):
    """A published step.

    **Attributes:**

    - `table`: which of the tables it belongs to.
    - `name`: what it is called in messages.
    - `seconds`: its mean; its median where `median` says so.
    - `job`: the same, or `None`.
    - `reason`: why there is no job.
    - `median`: whether a median was published.
    - `family`: the rows that are left out together when a law is fitted; by default the table.
    """

    table: str
    name: str
    seconds: float
    job: data.Job | None = None
    reason: str = ""
    median: bool = False
    family: str = ""


def published(folder: pathlib.Path) -> Iterator[Published]:
    """All rows of a folder like `../shared/data`."""
    for row in _rows_of_steps(folder):
        yield _expressed(table_of(row), name_of(row), of_steps, row)
    for which in ("single", "multi"):
        table = f"vTrain, Megatron-DeepSpeed, A100, {which} node"
        for row in read(folder / "published" / f"a100_megatron_deepspeed_{which}_node.csv"):
            name = ", ".join(filter(None, row.values()))
            yield _expressed(table, name, _of_vtrain, row, "iteration time (ms)", 1000)
    for row in read(folder / "mlperf" / "scaling_families.csv"):
        one = _expressed(FAMILIES, row["system"], _of_family, row, "p50")
        yield msgspec.structs.replace(one, median=True)
    for row in _systems_with_experts(folder / "mlperf_v6"):
        one = _expressed(table_of(row), row["system"], of_steps, row)
        yield msgspec.structs.replace(one, median=True)


def _rows_of_steps(folder: pathlib.Path) -> list[dict[str, str]]:
    """The rows of both tables of steps, without those of the first that the second completes."""
    further = read(folder / "steps" / "step_means.csv")
    completed = {(row["measured_steps_row"].removesuffix(".0"), row["model"]) for row in further}
    rows = enumerate(read(folder / "published" / "measured_steps.csv"))
    return [row for i, row in rows if (str(i), row["model"]) not in completed] + further


def _expressed(table, name, function, row, column="step_time_s", per_second=1) -> Published:
    time = number(row[column])
    if time is None:
        reason = f"its time is {row[column]}, no number above 0" if row[column] else "no step time"
        return Published(table, name, 0.0, reason=reason)
    job, reason = attempt(job_of, function, row)
    family = row.get("family") or table if job else ""
    return Published(table, name, time / per_second, job, reason, family=family)


# vTrain does not say which Megatron-DeepSpeed it measured; it is taken to be a fork of 2021.
def _of_vtrain(row: dict[str, str]) -> data.Job:
    number = ft.partial(count, row)
    tp, pp = number("tensor parallelism"), number("pipeline parallelism")
    dp, size = number("data parallelism"), number("micro batch")
    hidden, sequence = number("hidden size"), number("sequence length")
    sizes = {"hidden_size": hidden, "ffn_size": 4 * hidden, "vocab_size": 51200}
    sizes |= {"num_layers": number("# layers"), "num_heads": number("attention heads")}
    software = {"software": "megatron-2021", **switches_of("megatron-2021")}
    software |= {"dtype": "fp16", "recompute": "full"}
    microbatches, left = divmod(number("global batch"), dp * size)
    if left:
        raise ValueError("its numbers do not divide")
    return job_on(
        data.Model(**sizes, max_positions=sequence, **GPT),
        data.Layout(tp=tp, pp=pp, dp=dp),
        data.ScheduleConfig("1f1b", microbatches),
        data.Training(size, sequence, **software),
        "dgx-a100",
    )


def _of_family(row: dict[str, str]) -> data.Job:
    sizes = {key: count(row, key) for key in ("microbatches", "dp", "gbs")}
    return job_of_family({**sizes, "family": row["family"]})


def _systems_with_experts(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Systems of MLPerf Training v6.0 that train models with experts, as rows of steps. A time is
    the median of the medians of the runs, of which the first step does not count."""
    runs = defaultdict(lambda: defaultdict(list))
    devices = {}
    for row in read(folder / "step_times.csv"):
        key = row["system"], row["bench"]
        devices[key] = row["device"]
        time = number(row["step_time_s"])
        if time is not None and "first" not in row["note"]:
            runs[key][row["run"]].append(time)
    for row in read(folder / "configs.csv"):
        key = row["system"], row["bench"]
        if not has_experts({"model": row["bench"]}) or not row["tp"] or key not in runs:
            continue
        p50 = np.median([np.median(steps) for steps in runs[key].values()])
        modules = "" if row["recompute"].startswith("none") else row["recompute"].split(" ")[0]
        found = defaultdict(str, _SET | {name: row[key] for name, key in _COLUMNS.items()})
        for said in WORDS["said"]:
            if said["part"] in row[said["column"]]:
                found |= said["is"]
        found |= {
            "system": row["system"],
            "gpu_type": f"DGX-{devices[key]}",
            "micro_batch": row["microbatch"].split(" ")[0],
            "etp": row["etp"] or "1",
            "dtype": re.split("[ ;]", row["dtype"])[0],
            "dispatcher": re.split("[ /]", row["dispatcher"].removeprefix("flex/"))[0],
            "recompute": "selective" if modules else "none",
            "recompute_modules": modules,
            "step_time_s": str(p50),
            "family": f"MLPerf v6.0 {row['bench']}",
        }
        yield found
