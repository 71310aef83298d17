"""`prism-jax compare`: ranks jobs by a figure of the step time."""

import argparse
from typing import Any

import msgspec

from ._arguments import (
    add_oom_argument,
    add_progress_argument,
    add_seed_argument,
    add_set_argument,
    count,
)
from ._devices import use_all_cores
from ._objective import add_objective_argument, objective
from ._over import add_over_argument, changes_of
from ._ranking import as_json, as_text


HELP = "rank jobs, or variants of one job, by a figure of the step time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "jobs",
        metavar="JOB",
        nargs="+",
        help="shipped jobs (`prism-jax jobs`), or .toml files",
    )
    add_objective_argument(parser)
    parser.add_argument(
        "--samples", type=count, default=16_384, metavar="N", help="steps for each job (16384)"
    )
    add_seed_argument(parser)
    add_set_argument(parser)
    add_over_argument(parser)
    add_oom_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import load_job

    of = objective(arguments.objective)
    jobs = []
    for name in arguments.jobs:
        for changes in changes_of(arguments.over):
            job = load_job(name, [*arguments.overrides, *changes])
            named = ", ".join([job.name, *changes])
            jobs.append(msgspec.structs.replace(job, name=named))
    if len(jobs) < 2:
        raise ValueError(
            "One job was given, and nothing to compare it with; give two jobs, or values of a key "
            "with `--over`."
        )

    from ..prediction import check_memory
    from ._load import tell_notes, wants_progress

    if not arguments.allow_oom:
        for job in jobs:
            check_memory(job)

    import jax

    from ..layouts import rank_layouts

    use_all_cores()
    found = rank_layouts(
        jobs,
        of,
        num_samples=arguments.samples,
        key=jax.random.key(arguments.seed),
        top=len(jobs),
        margin=None,
        progress=wants_progress(arguments),
    )
    tell_notes(jobs)
    return as_json(found, len(jobs)), as_text(found, len(jobs))
