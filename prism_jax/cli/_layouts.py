"""`prism-jax layouts`: the best layouts of a job's model on a number of GPUs."""

import argparse
from typing import Any

from .._misc import quoted, unknown_name
from . import _load
from ._command import Output, argument, command, repeated
from ._options import OBJECTIVE, PROGRESS, SEED, SET, over
from ._over import changes_of, values
from ._ranking import as_json, as_table
from ._values import count, objective
from ._workers import RAY, ray_executor


@command(
    "find the best layouts of a model on a given number of GPUs, by a figure of the step time",
    "my_job.toml --gpus 1024 --objective p95",
    argument(
        "job",
        "JOB",
        "a job whose model, machine, training and batch are kept (`prism-jax jobs`, or a .toml "
        "file)",
    ),
    argument("--gpus", "N", "how many GPUs each layout uses", count, required=True),
    OBJECTIVE,
    argument("--top", "K", "rank at least K layouts (20)", count, 20),
    argument("--batch", "N", "sequences in each step (those of the job)", count),
    repeated(
        "--choose",
        "KEY=VALUES",
        "values to choose from, such as tp=4,8 or recompute=none or schedule=1f1b,zb-h1; keys are "
        "tp, pp, cp, ep, virtual_stages, microbatch_size, zero, recompute, schedule",
    ),
    argument("--samples", "N", "steps for each layout (16384)", count, 16_384),
    SEED,
    SET,
    over(),
    *RAY,
    PROGRESS,
)
def run(arguments: argparse.Namespace) -> Output:
    of, space = objective(arguments.objective), _space(arguments.choose)
    points = changes_of(arguments.over)
    _check_kept([*arguments.overrides, *(change for point in points for change in point)])
    jobs = [_asked(arguments, changes) for changes in points]  # Bad input fails before JAX starts.

    from ..layouts import check_ranks, enumerate_layouts

    check_ranks(of)
    shown: dict[str, Any] = {"progress": _load.wants_progress(arguments)}
    with ray_executor(arguments) as executor:  # First, because the cluster may not answer.
        searches = []
        for job, batch in jobs:
            parts: dict[str, Any] = {"training": job.training, "kernels": job.kernels}
            parts |= {"batch_size": batch, "space": space, **shown}
            searches.append(enumerate_layouts(job.model, job.cluster, arguments.gpus, **parts))

        import jax

        from ..layouts import rank_layouts

        if executor is None:
            _load.use_all_cores()
        options = {"num_samples": arguments.samples, "top": arguments.top, "executor": executor}
        options |= {"key": jax.random.key(arguments.seed), **shown}
        rankings = [rank_layouts(one, of, **options) for one in searches]
    _load.tell_notes([job for job, _ in jobs])
    results = [
        {"over": changes, "sequences": batch, **as_json(one, arguments.top)}
        for changes, (_, batch), one in zip(points, jobs, rankings, strict=True)
    ]
    blocks = []
    for changes, (job, batch), one in zip(points, jobs, rankings, strict=True):
        blocks += [_title(arguments, job, batch, changes), as_table(one, arguments.top)]
    result = {"job": jobs[0][0].name, "gpus": arguments.gpus, "searches": results}
    return Output(result, blocks)


def _asked(arguments: argparse.Namespace, changes: list[str]) -> tuple[Any, int]:
    """The job with a cluster that is large enough, and the number of sequences in a step."""
    from ..data import load_job

    changes = [*arguments.overrides, *changes]
    job = load_job(arguments.job, changes)
    if job.model is None or job.cluster is None or job.training is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            "`training` to find layouts."
        )
    batch = job.layout.dp * job.schedule.num_microbatches * job.training.microbatch_size
    needed = -(-arguments.gpus // job.cluster.devices_per_node)
    if needed > job.cluster.num_nodes:
        job = load_job(arguments.job, [*changes, f"cluster.num_nodes={needed}"])
    return job, arguments.batch or batch


def _check_kept(changes: list[str]) -> None:
    """Raises a `ValueError` for a change of a key that the search chooses."""
    for change in changes:
        if change.split("=")[0].split(".")[0] in ("layout", "schedule"):
            raise ValueError(
                f"`{quoted(change)}` has no effect here, because the search chooses layouts and "
                "schedules; use `--choose`, `--batch` or `--gpus`, or change `model`, `cluster`, "
                "`training` or `kernels`."
            )


def _space(texts: list[str]) -> Any:
    """Raises a `ValueError` of one sentence."""
    import msgspec

    from ..layouts import LayoutSpace

    known = {field.name for field in msgspec.structs.fields(LayoutSpace)}
    given: dict[str, Any] = {}
    for text in texts:
        key, choices = values(text, "--choose", "tp=4,8")
        if key not in known:
            raise ValueError(f"`--choose {quoted(text)}`: {unknown_name('key', key, known)}")
        if key in given or len({*choices}) < len(choices):
            raise ValueError(
                f"`--choose {quoted(text)}` gives `{key}` or a value of it twice; give each once."
            )
        given[key] = choices if key in ("schedule", "recompute") else _wholes(text, choices)
    try:
        return msgspec.convert(given, LayoutSpace)
    except msgspec.ValidationError as error:
        raise ValueError(f"`--choose` cannot be used: {quoted(str(error))}.") from None


def _wholes(text: str, choices: list[str]) -> list[int]:
    if not all(choice.isdecimal() and len(choice) <= 9 for choice in choices):
        raise ValueError(
            f"`--choose {quoted(text)}` must be whole numbers with commas between them, such as "
            "tp=4,8."
        )
    return [int(choice) for choice in choices]


def _title(arguments: argparse.Namespace, job: Any, batch: int, changes: list[str]) -> str:
    tokens = batch * job.training.sequence_length
    with_ = f", {', '.join(changes)}" if changes else ""
    return (
        f"{job.model.name} on {arguments.gpus:,} GPUs of {job.cluster.name}, {batch:,} sequences "
        f"({tokens:,} tokens) a step{with_}"
    )
