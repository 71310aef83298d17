"""Where published layouts stand in a search for layouts: `python benchmarks/layouts.py`.

Each search has the model, machine, batch, precision and switches of a published job. All layouts
that divide evenly and fit the memory are ranked by the prediction without variability. With
`--samples`, the published layout and its possible rivals are also ranked by the mean and p95 of so
many steps. A layout whose predicted step is longer than the p95 of the published layout cannot rank
before it, so it is not simulated. If the published layout does not fit, the search ignores memory
and says so.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import jax

import prism_jax as prism


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
_SHARED = ROOT.parent / "shared" / "data"
# Llama team 2024 (arXiv:2407.21783), table 4: 16,384 GPUs, 16 sequences a replica and step. Their
# FSDP shards gradients and optimizer (section 3.3.2). The paper does not give the virtual stages;
# these are the ones with which the layout fits.
_LLAMA = ["layout.cp=1", "layout.dp=128", "cluster.num_nodes=2048", "schedule.num_microbatches=16"]
_LLAMA += ["training.zero=2", "training.accumulate_gradients=true"]
_JOBS: dict[str, tuple[str, list[str]]] = {
    "Llama 3, 16,384 H100": ("llama-3.1-405b-h100-65536", _LLAMA),
    "MLPerf v3.1, GPT-3, 4,096 H100": ("gpt3-175b-h100-4096", []),
    "MLPerf v3.1, GPT-3, 768 H100": ("gpt3-175b-h100-768", []),
}


def published() -> dict[str, prism.Job]:
    """The shipped jobs and, if the shared data are there, those of other submissions."""
    jobs = {name: prism.load_job(job, changes) for name, (job, changes) in _JOBS.items()}
    families = _SHARED / "mlperf" / "scaling_families.csv"
    if families.is_file():
        from benchmarks._published import published as rows

        for one in rows(_SHARED):
            if one.table == "MLPerf families" and one.job is not None:
                jobs[f"MLPerf, {one.name}"] = one.job
    return jobs


def stand(job: prism.Job, num_samples: int = 0) -> dict[str, Any]:
    """The rank of a job's layout among all layouts of its model: by prediction and, with a number
    of samples, by the mean and p95 of simulated steps.
    """
    assert job.model is not None
    assert job.cluster is not None
    assert job.training is not None
    assert job.kernels is not None
    own, memory = prism.predict(job), prism.memory(job)
    fits = memory.fits
    rivals = prism.enumerate_layouts(
        job.model,
        job.cluster,
        job.layout.world_size,
        training=job.training,
        batch_size=job.batch_size,
        kernels=job.kernels,
        space=prism.LayoutSpace(zero=tuple({1: 1, job.training.zero: 1})),
        any_memory=not fits,
    )
    rivals = sorted(rivals, key=_schedule)
    seconds = [prism.predict(one).mean for one in rivals]
    rank = 1 + sum(one < own.mean * (1 - 1e-9) for one in seconds)
    simulated = _simulated(job, rivals, seconds, num_samples) if num_samples else {}
    return {
        "layouts": len(rivals),
        "rank": rank,
        "share": rank / len(rivals),
        "predicted_s": own.mean,
        "best_s": min(seconds),
        "memory_gb": memory.fullest.bytes / 1e9,
        "device_gb": memory.device_bytes / 1e9,
        "fits": fits,
        **simulated,
    }


def _simulated(
    job: prism.Job, rivals: list[prism.Job], seconds: list[float], num_samples: int
) -> dict[str, Any]:
    """Ranks by the laws of steps, with common random numbers."""
    options: dict[str, Any] = {"num_samples": num_samples, "key": jax.random.key(0)}
    own = prism.rank_layouts([job], **options).best
    near = [one for one, s in zip(rivals, seconds, strict=True) if s < own.p95.value]
    others = [one for one in near if _what(one) != _what(job)]
    found = prism.rank_layouts([job, *others], top=len(near) + 1, **options)
    (mine,) = (one for one in found.layouts if one.job is job)
    return {
        "simulated": found.num_simulated,
        "p95_s": mine.p95.value,
        "best_p95_s": found.best.p95.value,
        "behind_s": mine.behind.value,
        "behind_error_s": mine.behind.standard_error,
        "rank_p95": mine.rank,
        "rank_mean": mine.rank_by_mean,
    }


def _what(job: prism.Job) -> tuple:
    return job.layout, job.schedule, job.training


def _schedule(job: prism.Job) -> tuple:
    layout, schedule = job.layout, job.schedule
    return layout.pp, schedule.kind, schedule.virtual_stages, schedule.num_microbatches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--samples", type=int, default=0, help="steps of each layout (none)")
    parser.add_argument("--only", default="", help="those with this in their names")
    arguments = parser.parse_args()
    found = {}
    if not arguments.json:
        header = ["published run", "GPUs", "layouts that fit", "rank by prediction"]
        if arguments.samples:
            header += ["rank by mean", "rank by p95", "p95, published layout", "p95, best layout"]
        print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    for name, job in published().items():
        if arguments.only not in name:
            continue
        found[name] = stand(job, arguments.samples)
        if not arguments.json:
            print(_row(name, job.layout.world_size, found[name]), flush=True)
    if arguments.json:
        print(json.dumps(found))


def _row(name: str, gpus: int, one: dict[str, Any]) -> str:
    """A row of a table in Markdown; ranks with their share of the layouts."""

    def rank(number: int) -> str:
        return f"{number} ({100 * number / one['layouts']:.1f} %)"

    fits = "" if one["fits"] else " (with any memory, as the published layout does not fit)"
    cells = [name, f"{gpus:,}", f"{one['layouts']:,}{fits}", rank(one["rank"])]
    if "rank_p95" in one:
        cells += [str(one["rank_mean"]), rank(one["rank_p95"])]
        cells += [f"{one['p95_s']:.4g} s", f"{one['best_p95_s']:.4g} s"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
