"""Files of jobs: written to be edited, imported, listed key by key; and those that are shipped."""

import re
import textwrap
from collections.abc import Iterable
from typing import Any

import msgspec

import prism_jax as prism

from .. import data
from .._files import shown, written_whole
from .._misc import quoted, unknown_name
from .._summary import GIB, Column, Table, picked, plain
from . import _load
from ._options import ALLOW_OOM, REQUIRED, SET, Given, Output, arguments, command
from ._outputs import Writes
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


@command(how={"out": {"default": "job.toml", "nargs": "?"}}, writes=Writes("out", ".toml"))
def init(given: Given) -> Output:
    """Write a job file with a comment on every key, to edit.

    out JOB.toml  the file to write (job.toml)

    example: prism-jax init my_job.toml
    """
    out = given.out
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
            if table != name or not short or "." in short:  # Those of a table within it.
                continue
            about = re.split(r"\.(?: (?=[A-Z`])|$)", key.about)[0]  # The first sentence.
            lines += [f"# {line}" for line in textwrap.wrap(f"{about}; {key.allowed}", 98)]
            default = f"# {short} = {key.default or '...'}"
            lines += [f"{short} = {given[short]}" if short in given else default, ""]
        lines.append("")
    return "\n".join(lines)


@command(
    SET,
    ALLOW_OOM,
    how={"--gpus": {**REQUIRED, "type": count}, "--batch": count, "--out": REQUIRED},
    writes=Writes("--out", ".toml"),
)
def import_(given: Given) -> Output:
    """Make a job file from a Hugging Face config.json or the arguments of Megatron-LM.

    file FILE  a config.json of Hugging Face; or the arguments of Megatron-LM: a .yaml with
        MODEL_ARGS, or a command line in a .sh or .txt file
    --gpus N  how many GPUs the job has
    --cluster CLUSTER  a shipped family of clusters (`prism-jax hardware`), or a .toml file
    --batch N  the sequences of a step (those of the file, or published ones)
    --software NAME  the software stack (`prism-jax kernels`) that sets what the file does not say;
        by default that of the file's framework and year, if the file says them
    --strict  refuse arguments of Megatron-LM that are not known
    --out JOB.toml  the job to write

    example: prism-jax import config.json --gpus 64 --batch 512 --set layout.tp=8 --out my_job.toml
    """
    names = ("cluster", "batch", "strict", "software")
    options = {name: getattr(given, name) for name in names}

    def imported(overrides: list[str]) -> prism.importers.Imported:
        return prism.importers.import_job(given.file, given.gpus, overrides=overrides, **options)

    found = imported(given.overrides)
    job: Any = found.job
    prism.prediction.memory(job)  # Raises where the layout does not fit the model.
    if found.question:
        raise ValueError(found.question)
    data.save_job(job, given.out)
    for note in found.notes:
        _load.tell_note(note)
    _load.tell_idle_sets(given.overrides, [lambda overrides: imported(overrides).job])
    try:
        _load.check_memory(given, job)
    except ValueError as error:
        said = str(error).rstrip(".")
        raise RuntimeError(f"{said}; {shown(given.out)} is written as it is.") from None
    parameters = prism.workload.count_parameters(job.model)
    training = job.training
    text = (
        f"{shown(given.out)}: {job.header}\n{parameters / 1e9:.1f} billion parameters, "
        f"{training.dtype}; software stack: {quoted(training.software or 'none')}"
    )
    result = {
        "out": given.out,
        "parameters": parameters,
        "world_size": job.layout.world_size,
        "global_batch_size": job.batch_size,
        "sequence_length": training.sequence_length,
        "software": training.software,
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
    table = Table(("key", value, "unit", Column("from", "where_from")), keys, most=None)
    lines = [f"tables of kernels: {', '.join(names) or 'none'}", *notes]
    result = {"keys": plain(keys), "kernels": names, "notes": list(notes)}
    return Output(result, [table, "\n".join(lines)])


_SOURCES = arguments("--sources  also print where the numbers are from (--json always has it)")


@command(_SOURCES, csv=True)
def jobs(given: Given) -> Output:
    """List the shipped jobs.

    example: prism-jax jobs --sources
    """
    jobs = [*map(data.load_job, data.list_names("job"))]
    rows = [_row(job) for job in jobs]
    columns = (
        Column("job", "name"),
        Column("GPUs", "world_size", "d"),
        "model",
        "cluster",
        Column("layout", _layout),
        "schedule",
        Column("measured", _measured, unit="s"),
    )
    return Output({"jobs": rows}, [Table(columns, rows, most=None), _sources(given, jobs)])


def _row(job: data.Job) -> dict[str, Any]:
    measured = {} if job.measured is None else plain(job.measured)
    return {
        "name": job.name,
        "world_size": job.layout.world_size,
        "model": job.model.name if job.model else "",
        "cluster": job.cluster.name if job.cluster else "",
        "layout": plain(job.layout),
        "schedule": job.schedule.kind,
        "num_microbatches": job.schedule.num_microbatches,
        "measured": {name: value for name, value in measured.items() if value is not None},
        "source": job.source,
    }


def _layout(row: dict[str, Any]) -> str:
    return " ".join(f"{name}{row['layout'][name]}" for name in ("tp", "pp", "dp", "cp", "ep"))


def _measured(row: dict[str, Any]) -> Any:
    return row["measured"].get("mean_s", row["measured"].get("p50_s", ""))


def _sources(given: Given, listed: Iterable[Any]) -> str:
    return "\n".join(f"{one.name}: {one.source}" for one in listed if given.sources)


@command(_SOURCES, csv=True)
def models(given: Given) -> Output:
    """List the shipped models.

    example: prism-jax models --sources
    """
    models = [*map(data.load_model, data.list_names("model"))]
    sizes = ("num_layers", "hidden_size", "vocab_size", "source")
    rows = [
        {
            "name": one.name,
            "parameters": prism.workload.count_parameters(one),
            **picked(one, *sizes),
        }
        for one in models
    ]
    columns = (
        Column("model", "name"),
        Column("billion parameters", "parameters", ".1f", scale=1e-9),
        Column("layers", "num_layers", "d"),
        Column("width", "hidden_size", "d"),
    )
    return Output({"models": rows}, [Table(columns, rows, most=None), _sources(given, models)])


@command(_SOURCES, how={"names": {"default": [], "nargs": "*"}}, csv=True)
def hardware(given: Given) -> Output:
    """List the shipped devices and clusters, or some of them.

    names NAME  devices or clusters (all)

    example: prism-jax hardware dgx-h100
    """
    of_devices, of_clusters = data.list_names("device"), data.list_names("cluster")
    known = {*of_devices, *of_clusters}
    for name in given.names:
        if name not in known:
            raise ValueError(unknown_name("device or cluster", name, known))
    wanted = {*given.names} or known
    # The job sets the number of nodes of a family; a cluster of two racks has all links.
    clusters = [data.load_cluster(name, 10**6) for name in of_clusters if name in wanted]
    wanted |= {cluster.device.name for cluster in clusters}
    devices = _in_groups([data.load_device(name) for name in of_devices if name in wanted])
    clusters = _in_groups(clusters)
    peaks = sorted({dtype for device in devices for dtype in device.peak_flop_per_s})
    columns = (
        _group_column(devices),
        Column("device", "name"),
        Column("GiB", "memory_bytes", ".1f", scale=1 / GIB),
        Column("TB/s", "memory_bandwidth_bytes_per_s", ".2f", scale=1e-12),
        *(
            Column(f"{dtype} TFLOP/s", f"peak_flop_per_s.{dtype}", ".0f", scale=1e-12)
            for dtype in peaks
        ),
    )
    columns_of_clusters = (
        _group_column(clusters),
        Column("cluster", "name"),
        Column("devices a node", "devices_per_node"),
        Column("device", "device.name"),
        Column("links", _links),
    )
    result = {
        "devices": msgspec.to_builtins(devices),
        "clusters": [_family(cluster) for cluster in clusters],
    }
    tables = [Table(columns, devices, most=None)]
    tables += [Table(columns_of_clusters, clusters, most=None)] * bool(clusters)
    return Output(result, [*tables, _sources(given, (*devices, *clusters))])


# Groups of machines by how their names begin, in the order in which they are listed.
_GROUPS = {
    "cloud": r"(aws|azure|coreweave|gcp|lambda)-",
    "NVIDIA": r"(?!rtx-|mi\d|tpu-)",
    "NVIDIA RTX": "rtx-",
    "AMD": r"mi\d",
    "TPU": "tpu-",
}


def _group_of(machine: Any) -> str:
    return next(group for group, begins in _GROUPS.items() if re.match(begins, machine.name))


def _in_groups(machines: list[Any]) -> list[Any]:
    return sorted(machines, key=lambda machine: [*_GROUPS].index(_group_of(machine)))


def _group_column(machines: list[Any]) -> Column:
    """The group of a machine, beside the first of the group."""
    firsts = {_group_of(machine): machine.name for machine in reversed(machines)}
    groups = {name: group for group, name in firsts.items()}
    return Column("group", lambda machine: groups.get(machine.name, ""))


def _links(cluster: data.Cluster) -> str:
    return ", ".join(
        f"{link.name} {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s" for link in cluster.links
    )


def _family(cluster: data.Cluster) -> dict[str, Any]:
    """A cluster without its number of nodes."""
    found = msgspec.to_builtins(cluster)
    del found["num_nodes"]
    for link in found["links"][-1:]:
        link["group"] = None
    return found
