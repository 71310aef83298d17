"""`prism-jax kernels`: which kernel profiles are shipped, with sources."""

import argparse

import msgspec

from .. import data
from .._summary import Column, Table
from ._command import Output, command, flag


@command(
    "list the shipped kernel profiles, with their sources",
    "--variability",
    flag("--variability", "how much kernels vary, with sources"),
)
def run(arguments: argparse.Namespace) -> Output:
    if arguments.variability:
        return _variability()
    sources = [data.load_source(name) for name in data.list_kernels()]
    stacks = [data.load_software(name) for name in data.list_software()]
    blocks = []
    for source in sources:
        lines = [f"{source.name}: {source.who}, {source.when}; {source.licence}"]
        lines += [f"  chosen: {c.name} = {c.value}: {c.reason}" for c in source.constants]
        blocks.append("\n".join(lines))
    for stack in stacks:
        switches = (f"  {key} = {value}" for key, value in stack.training.items())
        blocks.append("\n".join([f"software {stack.name}: {stack.source}", *switches]))
    return Output(msgspec.to_builtins({"kernels": sources, "software": stacks}), blocks)


def _variability() -> Output:
    """The laws of all profiles as a table, and below it their numbered sources."""
    found = {name: data.load_variability(name) for name in data.list_kernels()}
    rows = [{"profile": name, "law": law} for name, laws in found.items() for law in laws]
    sources = list(dict.fromkeys(row["law"].source for row in rows))
    columns = (
        "profile",
        Column("kernel", lambda row: row["law"].kernel or "all"),
        Column("component", "law.component"),
        Column("family", "law.family"),
        Column(
            "parameters",
            lambda row: ", ".join(f"{k} {v:g}" for k, v in row["law"].parameters.items()),
        ),
        Column("source", lambda row: f"[{sources.index(row['law'].source) + 1}]"),
    )
    notes = "\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))
    table = Table(columns, rows, most=None)
    return Output(msgspec.to_builtins({"variability": found}), [table, notes])
