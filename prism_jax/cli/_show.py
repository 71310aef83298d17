from typing import Any

from .. import data
from .._misc import quoted
from .._summary import Column, Table, plain
from ._load import all_notes
from ._options import SET, Given, Output, argument, command


_WIDEST = 60


@command(
    "my_job.toml --set layout.tp=8",
    argument(
        "job JOB",
        "a shipped job (`prism-jax jobs`), or a .toml file; without it, list all keys",
        nargs="?",
    ),
    *SET,
    csv=True,
)
def run(given: Given) -> Output:
    """List every key of a job with its value, its unit and where the value is from."""
    if given.job is None:
        known = data.job_keys()
        columns = ("key", Column("default", lambda key: key.default or ""), "unit", "allowed")
        return Output({"keys": plain(known)}, [Table(columns, known, most=None)])
    job = data.load_job(given.job, given.overrides)
    keys = data.assumed_keys(job)
    names = [] if job.kernels is None else [source.name for source in job.kernels.sources]
    notes = all_notes(job)
    table = Table(
        ("key", Column("value", _value), "unit", Column("from", "origin")), keys, most=None
    )
    lines = [f"tables of kernels: {', '.join(names) or 'none'}", *notes]
    result = {"keys": plain(keys), "kernels": names, "notes": list(notes)}
    return Output(result, [table, "\n".join(lines)])


def _value(key: Any) -> str:
    return quoted(data.toml_value(key.value), _WIDEST)
