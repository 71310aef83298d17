from .._summary import plain
from . import _load
from ._expected import expected_error_json
from ._options import ALLOW_OOM, NO_PROFILE, SET, Given, Output, command


@command("gpt3-175b-h100-4096 --set training.dtype=fp8", NO_PROFILE, *SET, ALLOW_OOM, csv=True)
def run(given: Given) -> Output:
    """Print the step time without variability, and its parts, within seconds."""
    from ..data import load_job
    from ..prediction import (
        check_memory,
        energy,
        expected_error,
        parts_table,
        predict,
        throughput,
    )

    job = load_job(given.job, given.overrides)
    if not given.allow_oom:
        check_memory(job)
    found = predict(job)
    _load.tell_notes([job])
    per_gpu = throughput(job)
    assert per_gpu is not None  # `predict` raises where a job has no model.
    result = {"job": job.name, "world_size": job.layout.world_size, **plain(found)}
    result["step_time_s"] = {"mean": result.pop("mean")}
    result["throughput"] = plain(per_gpu)
    result["memory_bytes"] = per_gpu.memory_bytes
    drawn = energy(job, found)
    if drawn is not None:
        result["energy"] = plain(drawn)
    error = expected_error(job)
    low, high = (found.mean * factor for factor in error.interval())
    result["prediction_interval_90"] = {"mean": [low, high]}
    result["expected_error"] = expected_error_json(error)
    head = (
        f"{job.name}: {found.mean:.5g} s a step on {job.layout.world_size:,} GPUs, without "
        "variability"
    )
    such = f"90 % of such runs: {low:.4g} .. {high:.4g} s, {error}"
    parts = dict(sorted(found.breakdown.items(), key=lambda part: -part[1]))
    lines = [head, such, *per_gpu.lines(), *([] if drawn is None else [drawn.line()])]
    return Output(result, ["\n".join(lines), parts_table(parts)])
