from typing import Any

import msgspec

from .._misc import quoted, unknown_name
from . import _load
from ._options import OBJECTIVE, RANDOM, Given, Output, argument, command, over, repeated
from ._over import changes_of, values
from ._ranking import as_json, as_table
from ._values import count, objective
from ._workers import RAY, ray_executor


@command(
    "my_job.toml --gpus 1024 --objective p95",
    argument("job JOB", "the job whose model, machine, training and batch are kept"),
    argument("--gpus N", "how many GPUs each layout uses", count, required=True),
    OBJECTIVE,
    argument("--top K", "rank at least K layouts (20)", count, 20),
    argument("--batch N", "sequences in each step (those of the job)", count),
    repeated(
        "--choose KEY=VALUES",
        "values to choose from, such as tp=4,8 or recompute=none or schedule=1f1b,zb-h1; keys are "
        "tp, pp, cp, ep, virtual_stages, microbatch_size, zero, recompute, schedule",
    ),
    argument("--samples N", "steps for each layout (16384)", count, 16_384),
    *RANDOM,
    over(),
    *RAY,
)
def run(given: Given) -> Output:
    """Find the best layouts of a model on a given number of GPUs, by a figure of the step time."""
    of, space = objective(given.objective), _space(given.choose)
    points = changes_of(given.over)
    _check_kept([*given.overrides, *(change for point in points for change in point)])
    jobs = [_asked(given, changes) for changes in points]  # Bad input fails before JAX starts.

    from ..layouts import check_ranks, enumerate_layouts

    check_ranks(of)
    with ray_executor(given) as executor:  # First, because the cluster may not answer.
        searches = []
        for job, batch in jobs:
            parts: dict[str, Any] = {"training": job.training, "kernels": job.kernels}
            parts |= {"batch_size": batch, "space": space, "progress": _load.wants_progress(given)}
            searches.append(enumerate_layouts(job.model, job.cluster, given.gpus, **parts))

        from ..layouts import rank_layouts

        if executor is None:
            _load.use_all_cores()
        options = {"top": given.top, "executor": executor, **_load.options_of(given)}
        rankings = [rank_layouts(one, of, **options) for one in searches]
    _load.tell_notes([job for job, _ in jobs])
    blocks, results = [], []
    for changes, (job, batch), one in zip(points, jobs, rankings, strict=True):
        results.append({"over": changes, "sequences": batch, **as_json(one, given.top)})
        blocks += [_title(given, job, batch, changes), as_table(one, given.top)]
    return Output({"job": jobs[0][0].name, "gpus": given.gpus, "searches": results}, blocks)


def _asked(given: Given, changes: list[str]) -> tuple[Any, int]:
    """The job with a cluster that is large enough, and the number of sequences in a step."""
    from ..data import load_job

    changes = [*given.overrides, *changes]
    job = load_job(given.job, changes)
    if job.model is None or job.cluster is None or job.training is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            "`training` to find layouts."
        )
    batch = job.layout.dp * job.schedule.num_microbatches * job.training.microbatch_size
    nodes = -(-given.gpus // job.cluster.devices_per_node)
    if nodes > job.cluster.num_nodes:
        job = load_job(given.job, [*changes, f"cluster.num_nodes={nodes}"])
    return job, given.batch or batch


def _check_kept(changes: list[str]) -> None:
    """Raises a `ValueError` for a change of a key that the search chooses."""
    for change in changes:
        if change.partition("=")[0].partition(".")[0] in ("layout", "schedule"):
            raise ValueError(
                f"`{quoted(change)}` has no effect here, because the search chooses layouts and "
                "schedules; use `--choose`, `--batch` or `--gpus`, or change `model`, `cluster`, "
                "`training` or `kernels`."
            )


def _space(texts: list[str]) -> Any:
    """Raises a `ValueError` of one sentence."""
    from ..layouts import LayoutSpace

    known = {field.name for field in msgspec.structs.fields(LayoutSpace)}
    space: dict[str, Any] = {}
    for text in texts:
        key, choices = values(text, "--choose", "tp=4,8")
        option = f"`--choose {quoted(text)}`"
        if key not in known:
            raise ValueError(f"{option}: {unknown_name('key', key, known)}")
        if key in space or len({*choices}) < len(choices):
            raise ValueError(f"{option} gives `{key}` or a value of it twice; give each once.")
        if key not in ("schedule", "recompute"):
            if not all(choice.isdecimal() and len(choice) <= 9 for choice in choices):
                raise ValueError(
                    f"{option} must be whole numbers with commas between them, such as tp=4,8."
                )
            choices = [*map(int, choices)]
        space[key] = choices
    try:
        return msgspec.convert(space, LayoutSpace)
    except msgspec.ValidationError as error:
        raise ValueError(f"`--choose` cannot be used: {quoted(str(error))}.") from None


def _title(given: Given, job: Any, batch: int, changes: list[str]) -> str:
    tokens = batch * job.training.sequence_length
    about = f"{job.model.name} on {given.gpus:,} GPUs of {job.cluster.name}, {batch:,} sequences "
    return ", ".join([f"{about}({tokens:,} tokens) a step", *changes])
