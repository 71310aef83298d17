"""Where the layouts that others chose and published stand in a search for layouts of the same model
on the same machine: `python benchmarks/layouts.py`.

Each search has the batch, precision and switches of the published job. All layouts that divide and
fit the memory are ranked by what is predicted if nothing varies. Where the published one does not
fit, memory is left out, and that is said.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import prism_jax as prism


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
_SHARED = ROOT.parent / "shared" / "data"
# Llama team 2024 (arXiv:2407.21783), table 4: 16,384 GPUs, 16 sequences a replica and step. Their
# FSDP shares gradients and optimizer (section 3.3.2); the virtual stages are not told.
_LLAMA = ["layout.cp=1", "layout.dp=128", "cluster.num_nodes=2048", "schedule.num_microbatches=16"]
_JOBS: dict[str, tuple[str, list[str]]] = {
    "Llama 3, 16,384 H100": ("llama-3.1-405b-h100-65536", _LLAMA),
    "MLPerf v3.1, GPT-3, 4,096 H100": ("gpt3-175b-h100-4096", []),
    "MLPerf v3.1, GPT-3, 768 H100": ("gpt3-175b-h100-768", []),
}


def published() -> dict[str, prism.Job]:
    """The jobs that ship, and those of other submissions where the shared data are there."""
    jobs = {name: prism.load_job(job, changes) for name, (job, changes) in _JOBS.items()}
    families = _SHARED / "mlperf" / "scaling_families.csv"
    if families.is_file():
        from benchmarks._published import published as rows

        for one in rows(_SHARED):
            if one.table == "MLPerf families" and one.job is not None:
                jobs[f"MLPerf, {one.name}"] = one.job
    return jobs


def stand(job: prism.Job) -> dict[str, Any]:
    """How many layouts of a job's model are predicted to be faster than its own."""
    assert job.model is not None
    assert job.cluster is not None
    assert job.training is not None
    assert job.kernels is not None
    batch = job.layout.dp * job.schedule.num_microbatches * job.training.microbatch_size
    own, device = prism.predict(job), job.cluster.device.memory_bytes
    fits = own.memory_bytes <= device
    rivals = prism.enumerate_layouts(
        job.model,
        job.cluster,
        job.layout.world_size,
        training=job.training,
        batch_size=batch,
        kernels=job.kernels,
        space=prism.LayoutSpace(zero=tuple({1: 1, job.training.zero: 1})),
        any_memory=not fits,
    )
    seconds = [prism.predict(one).mean for one in sorted(rivals, key=_schedule)]
    rank = 1 + sum(one < own.mean * (1 - 1e-9) for one in seconds)
    return {
        "layouts": len(rivals),
        "rank": rank,
        "share": rank / len(rivals),
        "predicted_s": own.mean,
        "best_s": min(seconds),
        "memory_gb": own.memory_bytes / 1e9,
        "device_gb": device / 1e9,
        "fits": fits,
    }


def _schedule(job: prism.Job) -> tuple:
    layout, schedule = job.layout, job.schedule
    return layout.pp, schedule.kind, schedule.virtual_stages, schedule.num_microbatches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = {}
    for name, job in published().items():
        found[name] = stand(job)
        if not arguments.json:
            one = found[name]
            print(
                f"{name:<60} rank {one['rank']:>4} of {one['layouts']:>5,} "
                f"({100 * one['share']:4.1f} %), {one['predicted_s']:.4g} s, best "
                f"{one['best_s']:.4g} s; {one['memory_gb']:.1f} of {one['device_gb']:.1f} GB"
                f"{'' if one['fits'] else ': does not fit, so memory is left out'}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
