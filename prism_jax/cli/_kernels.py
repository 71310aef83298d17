import msgspec

from .. import data
from .._summary import Column, Table
from ._options import Given, Output, command, flag


@command("--variability", flag("--variability", "how much kernels vary, with sources"))
def run(given: Given) -> Output:
    """List the shipped kernel profiles, with their sources."""
    if given.variability:
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
    laws = [law for of_profile in found.values() for law in of_profile]
    sources = list(dict.fromkeys(law.source for law in laws))
    names = [name for name, of_profile in found.items() for _ in of_profile]
    number = Column("source", lambda law: f"[{sources.index(law.source) + 1}]")
    table = data.law_table(laws, number)
    rows = [(name, *cells) for name, cells in zip(names, table.cells(), strict=True)]
    table = Table(("profile", *table.header()), rows, most=None)
    notes = "\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))
    return Output(msgspec.to_builtins({"variability": found}), [table, notes])
