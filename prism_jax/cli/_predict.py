"""What needs no sampling: the step without variability, and the memory."""

from .._summary import plain
from ..data import load_job
from . import _load, _prism as prism
from ._options import ALLOW_OOM, NO_PROFILE, SET, Given, Output, command


@command(NO_PROFILE, SET, ALLOW_OOM, csv=True)
def predict(given: Given) -> Output:
    """Print the step time without variability, and its parts, within seconds.

    example: prism-jax predict gpt3-175b-h100-4096 --set training.dtype=fp8
    """
    job, prediction = load_job(given.job, given.overrides), prism.prediction
    if not given.allow_oom:
        prediction.check_memory(job)
    found = prediction.predict(job)
    _load.tell_notes([job])
    per_gpu, drawn = prediction.throughput(job), prediction.energy(job, found)
    assert per_gpu is not None  # `predict` raises where a job has no model.
    result = {"job": job.name, "world_size": job.layout.world_size, **plain(found)}
    result["step_time_s"] = {"mean": result.pop("mean")}
    result["throughput"] = plain(per_gpu)
    result["memory_bytes"] = per_gpu.memory_bytes
    if drawn is not None:
        result["energy"] = plain(drawn)
    error = prediction.expected_error(job)
    low, high = (found.mean * factor for factor in error.interval())
    result["prediction_interval_90"] = {"mean": [low, high]}
    result["expected_error"] = _load.expected_error_json(error)
    head = (
        f"{job.name}: {found.mean:.5g} s a step on {job.layout.world_size:,} GPUs, without "
        "variability"
    )
    such = f"90 % of such runs: {low:.4g} .. {high:.4g} s, {error}"
    parts = dict(sorted(found.breakdown.items(), key=lambda part: -part[1]))
    lines = [head, such, *per_gpu.lines(), *([] if drawn is None else [drawn.line()])]
    return Output(result, ["\n".join(lines), prediction.parts_table(parts)])


@command(NO_PROFILE, SET, csv=True)
def memory(given: Given) -> Output:
    """Print the peak memory of each pipeline rank, by part.

    example: prism-jax memory gpt3-175b-h100-4096 --set training.recompute=full
    """
    job = load_job(given.job, given.overrides)
    found = prism.prediction.memory(job)
    assert job.cluster is not None
    fits = "fits" if found.fits else "does not fit"
    text = (
        f"{job.name} {fits} {job.cluster.device.name}, which has {found.device_bytes / 1e9:.1f} GB."
    )
    table = found.summary().named(job.name, most=None)
    return Output({**plain(found), "fits": found.fits}, [table, text])
