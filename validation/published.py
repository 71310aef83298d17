"""Published steps as jobs: the rows of `published/` and `steps/`, and systems of MLPerf Training.

A row that cannot be written as a job is kept, with the reason.
"""

import math
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from prism_jax import data

from .families import job_of_family
from .published_jobs import name_of, of_steps, table_of
from .published_models import has_experts
from .rows import WORDS, attempt, count, job_of, number, read


FAMILIES = "MLPerf families"


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
    - `device`: what the row calls its device.
    - `note`: what the row says besides.
    - `peak_bytes`: the peak of memory that its note has, 0 without one; what the allocator has
        `reserved` of the device, or what was allocated in it.
    """

    table: str
    name: str
    seconds: float
    job: data.Job | None = None
    reason: str = ""
    median: bool = False
    family: str = ""
    device: str = ""
    note: str = ""
    peak_bytes: float = 0.0
    reserved: bool = False


BYTES_OF_UNITS = {"GiB": 2**30, "GB": 1e9}
_PEAK = re.compile(r"\b(mem|alloc|allocated|reserved)\s+([\d.]+)\s*(Gi?B)?")


def published(folder: pathlib.Path) -> Iterator[Published]:
    """All rows of a folder like `../shared/data`."""
    for row in rows_of_steps(folder):
        yield _expressed(table_of(row), name_of(row), of_steps, row)
    for which in ("single", "multi"):
        table = f"vTrain, Megatron-DeepSpeed, A100, {which} node"
        for row in read(folder / "published" / f"a100_megatron_deepspeed_{which}_node.csv"):
            name = ", ".join(filter(None, row.values()))
            yield _expressed(table, name, _of_vtrain, row, "iteration time (ms)", 1000)
    for row in read(folder / "mlperf" / "scaling_families.csv"):
        yield _expressed(FAMILIES, row["system"], job_of_family, row, "p50", median=True)
    for row in _systems_with_experts(folder / "mlperf_v6"):
        yield _expressed(table_of(row), row["system"], of_steps, row, median=True)
    for row in _systems_with_adapters(folder / "mlperf_v6"):
        yield _expressed(table_of(row), row["system"], of_steps, row)


def of_other_machines(folder: pathlib.Path) -> Iterator[Published]:
    """The rows of `more_machines.csv`, which no table of kernels or of errors is fitted to."""
    for row in read(folder / "steps" / "more_machines.csv"):
        yield _expressed(table_of(row), name_of(row), of_steps, row)


def rows_of_steps(folder: pathlib.Path) -> list[dict[str, str]]:
    """The rows of both tables of steps, without those of the first that the second completes."""
    further = read(folder / "steps" / "step_means.csv")
    completed = {(row["measured_steps_row"].removesuffix(".0"), row["model"]) for row in further}
    rows = enumerate(read(folder / "published" / "measured_steps.csv"))
    return [row for i, row in rows if (str(i), row["model"]) not in completed] + further


def _expressed(table, name, of_row, row, column="step_time_s", per_second=1, median=False):
    time = number(row[column])
    if time is None:
        reason = f"its time is {row[column]}, no number above 0" if row[column] else "no step time"
        return Published(table, name, 0.0, reason=reason, median=median)
    job, reason = attempt(job_of, of_row, row)
    family = row.get("family") or table if job else ""
    device = row["gpu_type"] or (job.cluster.device.name if job else "")
    # A column of torchtitan is in GiB, and of what torch's allocator has reserved.
    kind, size, unit = said.groups() if (said := _PEAK.search(row["note"])) else ("", 0, "")
    peak = (number(size) or 0.0) * BYTES_OF_UNITS[unit or "GiB"]
    more = {
        "device": device,
        "note": row["note"],
        "peak_bytes": peak,
        "reserved": kind in ("mem", "reserved"),
    }
    return Published(table, name, time / per_second, job, reason, median, family, **more)


# vTrain does not say which Megatron-DeepSpeed it measured; it is taken to be a fork of 2021.
def _of_vtrain(row: dict[str, str]) -> data.Job:
    degrees = (count(row, f"{kind} parallelism") for kind in ("tensor", "pipeline", "data"))
    sizes = {"gpus": str(math.prod(degrees)), "ffn": str(4 * count(row, "hidden size"))}
    sizes |= {name: row[key] for name, key in WORDS["vtrain"]["columns"].items()}
    return of_steps(defaultdict(str, WORDS["vtrain"]["all"] | sizes))


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
    words = WORDS["mlperf_v6"]
    for row in read(folder / "configs.csv"):
        key = row["system"], row["bench"]
        if not has_experts({"model": row["bench"]}) or not row["tp"] or key not in runs:
            continue
        p50 = np.median([np.median(steps) for steps in runs[key].values()])
        modules = "" if row["recompute"].startswith("none") else row["recompute"].split(" ")[0]
        columns = {name: row[theirs] for name, theirs in words["columns"].items()}
        found = defaultdict(str, words["all"] | columns)
        for said in WORDS["said"]:
            found |= said["is"] if said["part"] in row[said["column"]] else {}
        found |= {"gpu_type": f"DGX-{devices[key]}", "etp": row["etp"] or "1"}
        found["micro_batch"] = row["microbatch"].split(" ")[0]
        found["dtype"] = re.split("[ ;]", row["dtype"])[0]
        found["dispatcher"] = re.split("[ /]", row["dispatcher"].removeprefix("flex/"))[0]
        found |= {"recompute": "selective" if modules else "none", "recompute_modules": modules}
        yield found | {"step_time_s": str(p50), "family": f"MLPerf v6.0 {row['bench']}"}


def _systems_with_adapters(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Systems of MLPerf Training v6.0 that train adapters, as rows of steps. A time is the median
    of the means between evaluations."""
    means, devices = defaultdict(list), {}
    for row in read(folder / "others.csv"):
        key, time = (row["system"], row["bench"]), number(row["value"])
        if "lora" in key[1] and row["what"] == "block_mean_train_step_time" and time is not None:
            means[key].append(time)
            devices[key] = row["device"]
    words = WORDS["mlperf_v6"]
    for row in read(folder / "configs.csv"):
        if (key := (row["system"], row["bench"])) in means:
            columns = {name: row[theirs] for name, theirs in words["columns"].items()}
            stated = {name: text for name, text in columns.items() if text and name != "model"}
            found = defaultdict(str, words["adapters"] | stated)
            found |= {"gpu_type": devices[key], "step_time_s": str(np.median(means[key]))}
            yield found | {"family": f"MLPerf v6.0 {row['bench']}"}
