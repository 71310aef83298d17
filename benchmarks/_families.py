"""The families of MLPerf Training logs: one layout and software at several scales.

A family's job is read from the columns and from its name, which gives model, device and degrees.
Nothing else is known of it. Runs are kept separate: a measured figure of a system is the median
over its runs.
"""

import dataclasses
import math
import pathlib
import re
from typing import Any

import numpy as np
import polars as pl

from prism_jax.data import Job, load_cluster, load_job

from ._published_models import cluster_of
from ._rows import attempt, note


# By words in the name of a family. Models fix these values; none is chosen.
_MODELS = {"gpt.?3": "gpt3-175b", r"(?<!\d)405b": "llama-3.1-405b"}
_MODELS |= {r"(?<!\d)70b": "llama-3.1-70b", r"(?<!\d)8b": "llama-3.1-8b"}
_OTHERS = "lora|llama.?2|mixtral|deepseek|qwen|kimi|distill"  # Their sizes are other models'.
# The default of the public configuration of GPT-3; the logs of v3.0 and v3.1 do not state it.
_VIRTUAL_STAGES = 12
# Families that the logs have, too, and `scaling_families.csv` does not list. The layout is that of
# their public configurations; as many steps as a run of 512 or 768 nodes has tell the global batch.
_MORE = {
    "B gpt3 H100 tp4pp8 (Eos v3.1)": "eos_n{}_ngc23.09_nemo",
    "V gpt3 H100 tp4pp8 (DGX v3.0)": "dgxh100_n{}_nemo",
}


@dataclasses.dataclass(frozen=True)
class System:
    """One system of a family: its job, and the step times of its runs."""

    name: str
    job: Job
    runs: list[np.ndarray]

    @property
    def median(self) -> float:
        return float(np.median([np.median(run) for run in self.runs]))


def families(folder: pathlib.Path) -> dict[str, list[System]]:
    """The families with two systems and more, from the smallest."""
    rows = pl.read_csv(folder / "scaling_families.csv").to_dicts()
    for family, name in _MORE.items():
        for nodes, dp in ((64, 16), (96, 24)):
            sizes = {"dp": dp, "gbs": 128 * dp, "microbatches": 128}
            rows.append({"family": family, "system": name.format(nodes), **sizes})
    steps = pl.read_parquet(folder / "step_times.parquet").filter(pl.col("phase") == "steady")
    found: dict[str, list[System]] = {}
    for row in sorted(rows, key=lambda row: (row["dp"], row["gbs"])):
        job, reason = attempt(job_of_family, row)
        if reason:
            note(f"{row['system']} is left out: {reason}")
        elif runs := _runs_of(row, steps):
            found.setdefault(row["family"], []).append(System(row["system"], job, runs))
    order = dict.fromkeys(row["family"] for row in rows)
    return {family: found[family] for family in order if len(found.get(family, ())) > 1}


def job_of_family(system: dict[str, Any]) -> Job:
    """The job of a system: its `family`, `dp`, `gbs` and `microbatches`.

    **Raises:**

    A `ValueError` if the model or the device that its family names is not known.
    """
    family = system["family"]
    words = family.lower()
    model = next((name for part, name in _MODELS.items() if re.search(part, words)), "")
    if not model or re.search(_OTHERS, words):
        raise ValueError(f"no model of the family {family}")
    cluster = cluster_of(family)

    def degree(name: str, default: int) -> int:
        found = re.search(rf"(?<![a-z]){name}(\d+)", words)
        return max(1, int(found[1])) if found else default

    degrees = {name: degree(name, 1) for name in ("tp", "pp", "cp")} | {"dp": system["dp"]}
    virtual_stages = degree("vpp?", _VIRTUAL_STAGES if model == "gpt3-175b" else 1)
    microbatch_size, left = divmod(system["gbs"], system["dp"] * system["microbatches"])
    if left:
        raise ValueError("its numbers do not divide")
    changes = {
        "model": model,
        "cluster": cluster,
        "num_nodes": -(-math.prod(degrees.values()) // load_cluster(cluster, 1).devices_per_node),
        **{f"layout.{name}": number for name, number in degrees.items()},
        "schedule.kind": "interleaved-1f1b" if virtual_stages > 1 else "1f1b",
        "schedule.num_microbatches": system["microbatches"],
        "schedule.virtual_stages": virtual_stages,
        "training.microbatch_size": microbatch_size,
        "training.sequence_length": 2048 if model == "gpt3-175b" else 8192,
    }
    if model == "llama-3.1-405b":  # 126 layers, distributed as if they were 128.
        changes |= {f"schedule.{end}_counts_as_layer": "true" for end in ("embedding", "head")}
    if "fp4" in words:
        changes["training.dtype"] = "fp4"
    return load_job("gpt3-175b-h100-4096", [f"{key}={value}" for key, value in changes.items()])


def _runs_of(system: dict[str, Any], steps: pl.DataFrame) -> list[np.ndarray]:
    words = system["family"].lower()
    bench = "gpt3"
    if bench not in words:  # A system may have run both sizes.
        size = re.search(r"(\d+)b", words)
        bench = f"llama31.*{size[1]}b$" if size else "llama31"
    mine = steps.filter(
        pl.col("system") == system["system"], pl.col("bench").str.contains(f"^{bench}")
    )
    runs = mine.partition_by("run", maintain_order=True)
    return [run.sort("i")["step_time_s"].to_numpy() for run in runs]
