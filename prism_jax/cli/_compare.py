import msgspec

from . import _load
from ._cost import COST, check_cost
from ._options import ALLOW_OOM, OBJECTIVE, RANDOM, Given, Output, argument, command, over
from ._over import changes_of
from ._ranking import as_json, as_table
from ._values import count, objective


@command(
    "gpt3-175b-h100-4096 --over schedule.virtual_stages=3,6,12",
    argument("jobs JOB", "shipped jobs (`prism-jax jobs`), or .toml files", nargs="+"),
    OBJECTIVE,
    argument("--samples N", "steps for each job (16384)", count, 16_384),
    *RANDOM,
    over(),
    ALLOW_OOM,
    *COST,
)
def run(given: Given) -> Output:
    """Rank jobs, or variants of one job, by a figure of the step time, or of the time per token."""
    from ..data import load_job

    of = objective(given.objective)
    check_cost(given)
    jobs = []
    for name in given.jobs:
        for changes in changes_of(given.over):
            job = load_job(name, [*given.overrides, *changes])
            jobs.append(msgspec.structs.replace(job, name=", ".join([job.name, *changes])))
    if len(jobs) < 2:
        raise ValueError(
            "One job was given, and nothing to compare it with; give two jobs, or values of a key "
            "with `--over`."
        )

    from ..prediction import check_memory

    for job in () if given.allow_oom else jobs:
        check_memory(job)

    from ..layouts import rank_layouts

    _load.use_all_cores()
    found = rank_layouts(jobs, of, top=len(jobs), **_load.options_of(given))
    _load.tell_notes(jobs)
    return Output(as_json(found, len(jobs), given), [as_table(found, len(jobs), given)])
