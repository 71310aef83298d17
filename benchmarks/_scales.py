"""From small runs to large: each family of `scaling_families.csv` is calibrated on its smallest
system and predicts the others.

A family is one layout and schedule at several numbers of replicas and microbatches. Its job is read
from the columns and from the name of the family, which gives model, device and degrees. Nothing
else is known of a family. Runs are kept separate: a measured figure of a system is the median over
its runs.
"""

import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from prism_jax.data import load_cluster

from ._published_machines import cluster_of
from ._rows import attempt, note


# By words in the name of a family. Models fix these values; none is chosen.
_MODELS = {"gpt.?3": "gpt3-175b", r"(?<!\d)405b": "llama-3.1-405b"}
_MODELS |= {r"(?<!\d)70b": "llama-3.1-70b", r"(?<!\d)8b": "llama-3.1-8b"}
_OTHERS = "lora|llama.?2|mixtral|deepseek|qwen|kimi|distill"  # Their sizes are other models'.
_SEQUENCE = {"gpt3-175b": 2048}
# The default of the public configuration of GPT-3; the logs of v3.0 and v3.1 do not state it.
_VIRTUAL_STAGES = 12
_QUANTILES = (np.arange(4000) + 0.5) / 4000


def scale_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each predicted system, and for each system that is calibrated to."""
    import polars as pl

    table = pl.read_csv(folder / "scaling_families.csv")
    steps = pl.read_parquet(folder / "step_times.parquet").filter(pl.col("phase") == "steady")
    noise = {row["system"]: row for row in pl.read_csv(folder / "run_vs_run_noise.csv").to_dicts()}
    for family in table["family"].unique(maintain_order=True):
        systems = table.filter(pl.col("family") == family).sort("dp", "gbs").to_dicts()
        _, reason = attempt(lambda one=systems: [*map(overrides, one)])
        if reason:
            note(f"{family} is left out: {reason}")
        elif len(systems) > 1:
            yield from _family_rows(systems, steps, noise)


def _family_rows(systems, steps, noise) -> Iterator[dict[str, Any]]:
    import jax

    import prism_jax as prism

    smallest = systems[0]
    jobs = [prism.load_job("gpt3-175b-h100-4096", overrides(system)) for system in systems]
    measured = [runs_of(system, steps) for system in systems]
    start = time.perf_counter()
    name = f"{smallest['system']}, MLPerf Training logs"
    key = jax.random.key(0)
    calibrated = prism.calibrate(jobs[0], measured[0], source=name, key=key).calibrated
    calibrate_s = time.perf_counter() - start
    assert calibrated is not None
    for system, job, runs in zip(systems, jobs, measured, strict=True):
        assert job.kernels is not None
        kernels = prism.data.apply_calibrated(job.kernels, calibrated, "calibrated")
        # The steps of a run share their GPUs: these decide its level, not its spread.
        law, of_run = (
            prism.simulate(
                prism.compile_job(msgspec.structs.replace(job, kernels=kernels)),
                num_samples=100_000,
                key=jax.random.key(0),
            )
            for kernels in (kernels, _without_rank(kernels))
        )
        predicted = figures(np.asarray(of_run.quantile(_QUANTILES)))
        predicted |= {"p50_s": law.quantile(0.5), "mean_s": law.mean}
        each = [figures(run) for run in runs]
        found = {k: float(np.median([one[k] for one in each])) for k in predicted}
        of_runs = noise.get(system["system"], {})
        row = {"family": system["family"], "system": system["system"]}
        row |= {"gpus": job.layout.world_size}
        row |= {"calibrated_on": smallest["system"], "calibrate_s": calibrate_s}
        row |= {"runs": len(runs), "predicted": predicted, "measured": found, "of_runs": each}
        row |= _judged(predicted, found, of_runs)
        yield row


def _judged(predicted, measured, of_runs) -> dict[str, Any]:
    """Errors beside their limits: a bound, or how much runs of the system differ."""
    cv = predicted["core_cv"] / measured["core_cv"]
    errors = {
        "p50_error": predicted["p50_s"] / measured["p50_s"] - 1,
        "p95_p50_error": predicted["p95_p50"] - measured["p95_p50"],
        "core_cv_ratio": cv,
    }
    allowed = {
        "p50_error": max(0.015, of_runs.get("p50_d", 0) / 100),
        "p95_p50_error": max(0.01, of_runs.get("p95_d", 0) / 100),
        "core_cv_ratio": max(1.5, of_runs.get("std_ratio", 1)),
    }
    within = {
        name: max(cv, 1 / cv) <= allowed[name]
        if name == "core_cv_ratio"
        else abs(errors[name]) <= allowed[name]
        for name in errors
    }
    return {**errors, "allowed": allowed, "within": within}


def figures(steps: np.ndarray) -> dict[str, float]:
    """Figures of the steps of one run, or of evenly spaced quantiles of a law."""
    from prism_jax.calibration._observe import core_spread

    median = np.median(steps)
    return {
        "mean_s": float(np.mean(steps)),
        "p50_s": float(median),
        "p95_p50": float(np.quantile(steps, 0.95) / median),
        "core_cv": core_spread(steps),
    }


def overrides(system: dict[str, Any]) -> list[str]:
    """The changes that turn any job into that of a system.

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

    tp, pp, cp, dp = degree("tp", 1), degree("pp", 1), degree("cp", 1), system["dp"]
    virtual_stages = degree("vpp?", _VIRTUAL_STAGES if model == "gpt3-175b" else 1)
    world_size = tp * pp * cp * dp
    microbatch_size, left = divmod(system["gbs"], dp * system["microbatches"])
    if left:
        raise ValueError("its numbers do not divide")
    changes = {
        "model": model,
        "cluster": cluster,
        "num_nodes": -(-world_size // load_cluster(cluster, 1).devices_per_node),
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.cp": cp,
        "layout.dp": dp,
        "schedule.kind": "interleaved-1f1b" if virtual_stages > 1 else "1f1b",
        "schedule.num_microbatches": system["microbatches"],
        "schedule.virtual_stages": virtual_stages,
        "training.microbatch_size": microbatch_size,
        "training.sequence_length": _SEQUENCE.get(model, 8192),
    }
    if model == "llama-3.1-405b":  # 126 layers, distributed as if they were 128.
        changes["schedule.embedding_counts_as_layer"] = "true"
        changes["schedule.head_counts_as_layer"] = "true"
    if "fp4" in words:
        changes["training.dtype"] = "fp4"
    return [f"{key}={value}" for key, value in changes.items()]


def runs_of(system: dict[str, Any], steps) -> list[np.ndarray]:
    import polars as pl

    bench = "gpt3" if "gpt3" in system["family"].lower() else "llama31"
    mine = steps.filter(
        (pl.col("system") == system["system"]) & pl.col("bench").str.starts_with(bench)
    )
    if bench != "gpt3":  # A system may have run both sizes.
        size = re.search(r"(\d+)b", system["family"].lower())
        mine = mine.filter(pl.col("bench").str.ends_with(f"{size[1]}b" if size else ""))
    return [
        run.sort("i")["step_time_s"].to_numpy()
        for run in mine.partition_by("run", maintain_order=True)
    ]


def _without_rank(kernels):
    kept = tuple(v for v in kernels.variability if v.component != "rank")
    return msgspec.structs.replace(kernels, variability=kept)


def scale_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("family", "GPUs", "p50", "error of p50", "p95/p50", "p95/p50, measured", "core CV")
    header += ("core CV, measured", "core CV of each run")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        known = row["system"] == row["calibrated_on"]

        def mark(name: str, row=row, known=known) -> str:
            return "" if known or row["within"][name] else " (out)"

        of_runs = ", ".join(f"{100 * run['core_cv']:.2f}" for run in row["of_runs"])
        cells = (
            row["family"],
            f"{row['gpus']:,}" + (" (calibrated)" if known else ""),
            f"{predicted['p50_s']:.4g} s",
            f"{100 * row['p50_error']:+.2f} %" + mark("p50_error"),
            f"{predicted['p95_p50']:.4f}",
            f"{measured['p95_p50']:.4f}" + mark("p95_p50_error"),
            f"{100 * predicted['core_cv']:.2f} %",
            f"{100 * measured['core_cv']:.2f} %" + mark("core_cv_ratio"),
            f"{of_runs} %",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    longest = max((row["calibrate_s"] for row in rows), default=0)
    lines.append(f"The longest calibration takes {longest:.0f} s.")
    return "\n".join(lines)
