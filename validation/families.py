"""The families of MLPerf Training logs: one layout and software at several scales.

A family's job is read from the columns and from its name, which gives model, device and degrees.
Nothing else is known of it. Runs are kept separate: a measured figure of a system is the median
over its runs.
"""

import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
import polars as pl

import prism_jax as prism
from prism_jax.data import Job, apply_calibrated, load_cluster

from .published_models import cluster_of
from .rows import WORDS, attempt, count, note


_WORDS: Any = WORDS["families"]


class System(NamedTuple):
    """One system of a family: its job, and the step times of its runs."""

    name: str
    job: Job
    runs: list[np.ndarray]

    @property
    def median(self) -> float:
        return float(np.median([np.median(run) for run in self.runs]))

    @property
    def tail(self) -> float:
        return float(np.median([tail_of(run) for run in self.runs]))


def tail_of(steps: np.ndarray) -> float:
    """The p95 of steps over their median."""
    return float(np.quantile(steps, 0.95) / np.median(steps))


def families(folder: pathlib.Path) -> dict[str, list[System]]:
    """The families with two systems and more, from the smallest."""
    rows = pl.read_csv(folder / "scaling_families.csv").to_dicts()
    for family, name in _WORDS["more"].items():
        for nodes, dp in ((64, 16), (96, 24)):
            sizes = {"dp": dp, "gbs": 128 * dp, "microbatches": 128}
            rows.append({"family": family, "system": name.format(nodes), **sizes})
    steps = pl.read_parquet(folder / "step_times.parquet").filter(pl.col("phase") == "steady")
    found: dict[str, list[System]] = {row["family"]: [] for row in rows}
    for row in sorted(rows, key=lambda row: (row["dp"], row["gbs"])):
        job, reason = attempt(job_of_family, row)
        if reason:
            note(f"{row['system']} is left out: {reason}")
        elif runs := _runs_of(row, steps):
            found[row["family"]].append(System(row["system"], job, runs))
    return {family: systems for family, systems in found.items() if len(systems) > 1}


def job_of_family(system: dict[str, Any]) -> Job:
    """The job of a system: its `family`, `dp`, `gbs` and `microbatches`.

    **Raises:**

    A `ValueError` if the model or the device that its family names is not known.
    """
    dp, batch, microbatches = (count(system, key) for key in ("dp", "gbs", "microbatches"))
    family, words = system["family"], system["family"].lower()
    model = next((name for part, name in _WORDS["models"].items() if re.search(part, words)), "")
    if not model or re.search(_WORDS["others"], words):
        raise ValueError(f"no model of the family {family}")
    cluster = cluster_of(family)

    def degree(name: str, default: int = 1) -> int:
        found = re.search(rf"(?<![a-z]){name}(\d+)", words)
        return max(1, int(found[1])) if found else default

    degrees = {name: degree(name) for name in ("tp", "pp", "cp")} | {"dp": dp}
    virtual_stages = degree("vpp?", _WORDS["virtual_stages"].get(model, 1))
    microbatch_size, left = divmod(batch, dp * microbatches)
    if left:
        raise ValueError("its numbers do not divide")
    changes = {"model": model, "cluster": cluster}
    per_node = load_cluster(cluster, 1).devices_per_node
    changes["num_nodes"] = -(-math.prod(degrees.values()) // per_node)
    changes |= {f"layout.{name}": number for name, number in degrees.items()}
    changes["schedule.kind"] = "interleaved-1f1b" if virtual_stages > 1 else "1f1b"
    changes["schedule.num_microbatches"] = microbatches
    changes["schedule.virtual_stages"] = virtual_stages
    changes["training.microbatch_size"] = microbatch_size
    changes |= _WORDS["of_models"].get(model, _WORDS["of_models"]["others"])
    if "fp4" in words:
        changes["training.dtype"] = "fp4"
    return prism.load_job("gpt3-175b-h100-4096", [f"{k}={value}" for k, value in changes.items()])


def _runs_of(system: dict[str, Any], steps: pl.DataFrame) -> list[np.ndarray]:
    words, bench = system["family"].lower(), "gpt3"
    if bench not in words:  # A system may have run both sizes.
        size = re.search(r"(\d+)b", words)
        bench = f"llama31.*{size[1]}b$" if size else "llama31"
    is_bench = pl.col("bench").str.contains(f"^{bench}")
    mine = steps.filter(pl.col("system") == system["system"], is_bench)
    runs = mine.partition_by("run", maintain_order=True)
    return [run.sort("i")["step_time_s"].to_numpy() for run in runs]


def calibrated_to(known: Sequence[System], wanted: Sequence[System], **options: Any) -> list[Job]:
    """The jobs of some systems, calibrated to the runs of others; `options` are of `calibrate`."""
    (first, *_), others = known, [(one.job, one.runs) for one in known[1:]]
    options |= {"others": others, "key": jax.random.key(0)}
    found: Any = prism.calibrate(first.job, first.runs, **options).calibrated
    jobs: list[Any] = [msgspec.structs.replace(one.job, calibrated=found) for one in wanted]
    kernels = (apply_calibrated(job.kernels, found, "calibrated") for job in jobs)
    return [msgspec.structs.replace(job, kernels=k) for job, k in zip(jobs, kernels, strict=True)]
