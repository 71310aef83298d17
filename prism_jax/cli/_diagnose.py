from typing import Any

from .._files import shown
from .._summary import plain
from . import _load
from ._options import ALLOW_OOM, NO_PROFILE, RANDOM, Given, Output, argument, command
from ._trace import read_names
from ._values import count, number


def enough(text: str) -> int:
    """Of fewer steps no spread is known."""
    return count(text, 32)


@command(
    "gpt3-175b-h100-4096 --step-time 1.9",
    NO_PROFILE,
    argument(
        "--measured STEP_TIMES",
        "measured step times in the order of steps: a .csv or .parquet file with a column "
        "`step_time_s`, and a column `run` if there are several runs",
    ),
    argument("--step-time S", "one measured step time, in seconds", number(1e-6, "seconds")),
    argument("--trace DIR", "a folder with a Kineto trace of each rank, of the same steps"),
    argument("--names NAMES", "a .toml file with the meaning of ranges in traces"),
    argument("--samples N", "steps to simulate of each change (1024), at least 32", enough, 1024),
    *RANDOM,
    ALLOW_OOM,
)
def run(given: Given) -> Output:
    """Say whether a measured step time is normal, what explains it, and what to change."""
    if sum(one is not None for one in (given.measured, given.step_time, given.trace)) != 1:
        raise ValueError("Give one of --measured, --step-time and --trace.")
    if given.names and not given.trace:
        raise ValueError("`--names` says what ranges of a trace mean; give a --trace, too.")
    job = _load.load(given)
    if job.job is None or (job.modelled is None and given.trace is None):
        what = "it has no model, so no step is predicted; give a job with a model, or a --trace"
        raise ValueError(f"{shown(given.job)}: {what}.")
    from ..prediction import check_memory, predict
    from ..trace import rank_times, read_ranks, read_runs, step_times

    runs: list[Any] = [] if given.measured is None else read_runs(given.measured)
    ranks = rank_times(read_ranks(given.trace), read_names(given)) if given.trace else []
    if job.modelled is not None and not given.allow_oom:
        check_memory(job.job)

    import numpy as np

    from ..diagnosis import diagnose, diagnose_ranks, hypotheses

    if job.modelled is None:
        found = diagnose_ranks(job.job, ranks)
    else:
        if given.step_time is not None:
            runs = [np.array([given.step_time])]
        typical = float(np.median(np.concatenate(runs or [step_times(ranks)])))
        where = given.measured or given.trace or "--step-time"
        _load.tell_unit(where, typical, predict(job.job).mean)
        _load.tell_notes([job.job])
        _load.use_all_cores()
        _load.say(given, f"simulating causes and changes of {job.name}")
        key = _load.options_of(given)["key"]
        found = diagnose(hypotheses(job.job, num_samples=given.samples, key=key), runs, ranks)
    lines = "\n".join([f"{job.name}:", *found.lines()])
    result = {"job": job.name, **plain(found), "tell": found.tell}
    tables = [found.summary()] if found.causes else []  # The lines say why there is none.
    return Output(result, [lines, *tables, *found.changes_tables()])
