import os
import re
import textwrap

from .. import data
from .._files import shown, written_whole
from ._options import Given, Output, command


# The start of a first job, which is valid without changes.
_FIRST = """\
# A job for prism-jax. Lines that begin with `#` show defaults; take the `#` away to change one.
kind = "job"
# A shipped model (`prism-jax models`), a .toml file, or a table [model]:
model = "{model}"
# A shipped cluster (`prism-jax hardware`), a .toml file, or a table [cluster], and its nodes:
cluster = "{cluster}"
num_nodes = {nodes}
"""
_TABLES = ("layout", "schedule", "training")
_GIVEN = {
    "layout": {"tp": "{tp}", "pp": "{pp}", "dp": "{dp}"},
    "schedule": {"kind": '"1f1b"', "num_microbatches": "16"},
    "training": {"microbatch_size": "1", "sequence_length": "4096"},
}


@command("my_job.toml", ("out", {"nargs": "?", "default": "job.toml", "metavar": "JOB.toml"}))
def run(given: Given) -> Output:
    """Write a job file with a comment on every key, to edit."""
    out = given.out
    data.check_job_path(out)
    if os.path.exists(out):
        raise ValueError(f"{shown(out)}: a file is there already; give another name.")
    with written_whole(out) as partial:
        partial.write_text(commented_job(), encoding="utf-8")
    text = f"{shown(out)}: a job of 16 GPUs; edit it, then run: prism-jax predict {shown(out)}"
    return Output({"job": out}, [text])


def commented_job() -> str:
    """A job that is valid without changes, with every key of its tables."""
    about = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 2, "tp": 2, "pp": 2, "dp": 4}
    lines = [_FIRST.format(**about)]
    for name in _TABLES:
        lines.append(f"[{name}]")
        for key in data.job_keys():
            table, _, short = key.key.partition(".")
            if table != name or not short:
                continue
            given = _GIVEN[name].get(short)
            default = key.default or "..."
            value = given.format(**about) if given else default
            about_key = f"{_first_sentence(key.about)}; {key.allowed}"
            written = f"{'' if given else '# '}{short} = {value}"
            lines += [f"# {line}" for line in textwrap.wrap(about_key, 98)] + [written, ""]
        lines.append("")
    return "\n".join(lines)


def _first_sentence(about: str) -> str:
    """The first sentence of a text, without its full stop."""
    return re.split(r"\.(?: (?=[A-Z`])|$)", about)[0]
