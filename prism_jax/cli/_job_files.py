"""Files of jobs: written to be edited, made from those of other software, and listed key by key."""

import os
import re
import textwrap
from typing import Any

from .. import data
from .._files import shown, written_whole
from .._misc import counted, quoted
from .._summary import Column, Table, plain
from . import _load, _prism as prism
from ._options import ALLOW_OOM, REQUIRED, SET, Given, Output, command
from ._values import count


# The start of a first job, which is valid without changes.
_FIRST = """\
# A job for prism-jax. Lines that begin with `#` show defaults; take the `#` away to change one.
kind = "job"
# A shipped model (`prism-jax models`), a .toml file, or a table [model]:
model = "llama-3.1-8b"
# A shipped cluster (`prism-jax hardware`), a .toml file, or a table [cluster], and its nodes:
cluster = "dgx-h100"
num_nodes = 2
"""
_GIVEN = {
    "layout": {"tp": "2", "pp": "2", "dp": "4"},
    "schedule": {"kind": '"1f1b"', "num_microbatches": "16"},
    "training": {"microbatch_size": "1", "sequence_length": "4096"},
}
_WIDEST = 60


@command(how={"out": {"default": "job.toml", "nargs": "?"}})
def init(given: Given) -> Output:
    """Write a job file with a comment on every key, to edit.

    out JOB.toml  the file to write (job.toml)

    example: prism-jax init my_job.toml
    """
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
    lines = [_FIRST]
    for name, given in _GIVEN.items():
        lines.append(f"[{name}]")
        for key in data.job_keys():
            table, _, short = key.key.partition(".")
            if table != name or not short:
                continue
            about = re.split(r"\.(?: (?=[A-Z`])|$)", key.about)[0]  # The first sentence.
            lines += [f"# {line}" for line in textwrap.wrap(f"{about}; {key.allowed}", 98)]
            default = f"# {short} = {key.default or '...'}"
            lines += [f"{short} = {given[short]}" if short in given else default, ""]
        lines.append("")
    return "\n".join(lines)


@command(
    SET, ALLOW_OOM, how={"--gpus": {**REQUIRED, "type": count}, "--batch": count, "--out": REQUIRED}
)
def import_(given: Given) -> Output:
    """Make a job file from a Hugging Face config.json or the arguments of Megatron-LM.

    file FILE  a config.json of Hugging Face; or the arguments of Megatron-LM: a .yaml with
        MODEL_ARGS, or a command line in a .sh or .txt file
    --gpus N  how many GPUs the job has
    --cluster CLUSTER  a shipped family of clusters (`prism-jax hardware`), or a .toml file
    --batch N  the sequences of a step (those of the file, or published ones)
    --strict  refuse arguments of Megatron-LM that are not known
    --out JOB.toml  the job to write
    --force  overwrite a job that is there

    example: prism-jax import config.json --gpus 64 --batch 512 --set layout.tp=8 --out my_job.toml
    """
    data.check_job_path(given.out)
    if os.path.lexists(given.out) and not given.force:
        raise ValueError(
            f"--out `{shown(given.out)}` is there already; give another file, or `--force` to "
            "overwrite it."
        )
    options = {name: getattr(given, name) for name in ("cluster", "overrides", "batch", "strict")}
    found = prism.importers.import_job(given.file, given.gpus, **options)
    job: Any = found.job
    prism.prediction.memory(job)  # Raises where the layout does not fit the model.
    if found.question:
        raise ValueError(found.question)
    data.save_job(job, given.out)
    for note in found.notes:
        _load.tell_note(note)
    if not given.allow_oom:
        try:
            prism.prediction.check_memory(job)
        except ValueError as error:
            said = str(error).rstrip(".")
            raise RuntimeError(f"{said}; {shown(given.out)} is written as it is.") from None
    parameters = prism.workload.count_parameters(job.model)
    layout, number, training = job.layout, job.schedule.num_microbatches, job.training
    sequences = layout.dp * number * training.microbatch_size
    text = (
        f"{shown(given.out)}: {parameters / 1e9:.1f} billion parameters on "
        f"{layout.world_size} GPUs (tp{layout.tp} pp{layout.pp} dp{layout.dp} cp{layout.cp} "
        f"ep{layout.ep}); a step has {counted(sequences, 'sequence')} of "
        f"{training.sequence_length:,} tokens, in {counted(number, 'microbatch', 'es')} a replica "
        f"({training.dtype})"
    )
    result = {
        "out": given.out,
        "parameters": parameters,
        "world_size": layout.world_size,
        "global_batch_size": sequences,
        "sequence_length": training.sequence_length,
        "notes": list(found.notes),
    }
    return Output(result, [text])


@command(SET, how={"job": {"nargs": "?"}}, csv=True)
def show(given: Given) -> Output:
    """List every key of a job with its value, its unit and where the value is from.

    job JOB  a shipped job (`prism-jax jobs`), or a .toml file; without it, list all keys

    example: prism-jax show my_job.toml --set layout.tp=8
    """
    if given.job is None:
        known = data.job_keys()
        columns = ("key", Column("default", lambda key: key.default or ""), "unit", "allowed")
        return Output({"keys": plain(known)}, [Table(columns, known, most=None)])
    job = data.load_job(given.job, given.overrides)
    keys, notes = data.assumed_keys(job), _load.all_notes(job)
    names = [] if job.kernels is None else [source.name for source in job.kernels.sources]
    value = Column("value", lambda key: quoted(data.toml_value(key.value), _WIDEST))
    table = Table(("key", value, "unit", Column("from", "origin")), keys, most=None)
    lines = [f"tables of kernels: {', '.join(names) or 'none'}", *notes]
    result = {"keys": plain(keys), "kernels": names, "notes": list(notes)}
    return Output(result, [table, "\n".join(lines)])
