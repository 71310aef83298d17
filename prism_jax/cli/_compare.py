"""`prism-jax compare`: ranks jobs by a figure of the step time."""

import argparse

import msgspec

from . import _load
from ._command import Output, argument, command
from ._options import ALLOW_OOM, OBJECTIVE, PROGRESS, SEED, SET, over
from ._over import changes_of
from ._ranking import as_json, as_table
from ._values import count, objective


@command(
    "rank jobs, or variants of one job, by a figure of the step time",
    "gpt3-175b-h100-4096 --over schedule.virtual_stages=3,6,12",
    argument("jobs", "JOB", "shipped jobs (`prism-jax jobs`), or .toml files", nargs="+"),
    OBJECTIVE,
    argument("--samples", "N", "steps for each job (16384)", count, 16_384),
    SEED,
    SET,
    over(),
    ALLOW_OOM,
    PROGRESS,
)
def run(arguments: argparse.Namespace) -> Output:
    from ..data import load_job

    of = objective(arguments.objective)
    jobs = []
    for name in arguments.jobs:
        for changes in changes_of(arguments.over):
            job = load_job(name, [*arguments.overrides, *changes])
            jobs.append(msgspec.structs.replace(job, name=", ".join([job.name, *changes])))
    if len(jobs) < 2:
        raise ValueError(
            "One job was given, and nothing to compare it with; give two jobs, or values of a key "
            "with `--over`."
        )

    from ..prediction import check_memory

    for job in () if arguments.allow_oom else jobs:
        check_memory(job)

    import jax

    from ..layouts import rank_layouts

    _load.use_all_cores()
    found = rank_layouts(
        jobs,
        of,
        num_samples=arguments.samples,
        key=jax.random.key(arguments.seed),
        top=len(jobs),
        margin=None,
        progress=_load.wants_progress(arguments),
    )
    _load.tell_notes(jobs)
    return Output(as_json(found, len(jobs)), [as_table(found, len(jobs))])
