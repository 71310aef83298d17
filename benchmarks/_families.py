"""The families of MLPerf Training logs: one layout and software at several scales."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from prism_jax.data import Job, load_job

from ._scales import overrides, runs_of


# Families that the logs have, too, and `scaling_families.csv` does not list. The layout is that of
# their public configurations; as many steps as a run of 512 or 768 nodes has tell the global batch.
_GPT3 = {"microbatches": 128}
_MORE = {
    "B gpt3 H100 tp4pp8 (Eos v3.1)": [
        {"system": "eos_n64_ngc23.09_nemo", "dp": 16, "gbs": 2048, **_GPT3},
        {"system": "eos_n96_ngc23.09_nemo", "dp": 24, "gbs": 3072, **_GPT3},
    ],
    "V gpt3 H100 tp4pp8 (DGX v3.0)": [
        {"system": "dgxh100_n64_nemo", "dp": 16, "gbs": 2048, **_GPT3},
        {"system": "dgxh100_n96_nemo", "dp": 24, "gbs": 3072, **_GPT3},
    ],
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
    import polars as pl

    table = pl.read_csv(folder / "scaling_families.csv").to_dicts()
    steps = pl.read_parquet(folder / "step_times.parquet").filter(pl.col("phase") == "steady")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        rows.setdefault(row["family"], []).append(row)
    for family, systems in _MORE.items():
        rows[family] = [{"family": family, **system} for system in systems]
    found = {}
    for family, systems in rows.items():
        systems = sorted(systems, key=lambda row: (row["dp"], row["gbs"]))
        known = [_system(row, runs_of(row, steps)) for row in systems]
        known = [system for system in known if system.runs]
        if len(known) > 1:
            found[family] = known
    return found


def _system(row: dict[str, Any], runs: list[np.ndarray]) -> System:
    return System(row["system"], load_job("gpt3-175b-h100-4096", overrides(row)), runs)
