"""What the keys of a framework mean, by its table in `frameworks/`: each in terms of Megatron-LM's
flags, in which all say their model, layout, schedule and training.

A table has the same parts as that of Megatron-LM. Names are written in small letters, words with
dashes or underscores; `x*` stands for all that begin with `x`; sections before a name may be left
out. A key of a file:

- `[sets]` (of Megatron-LM alone): is read by the code; `[same]` and `[opposite]`: is another flag,
  or the name of a model (`model-name`, `model-flavor`);
- `[job]`: is a key of a job as it is; `[values]`: stands for other keys, by its value;
- `[no_effect]`: costs nothing in a step;
- `[costs]`, `[costs_in_fp8]`: costs up to a share of a step, in percent, that a job does not have.
  With at most 10 % it is left out with a note, with more it is refused.

Then `[computed]` has, in their order, what follows from flags by a formula, which may name flags of
its own; and `notes` sentences about what a formula has a value of.
"""

import contextlib
import dataclasses
import difflib
import fnmatch
import functools as ft
import itertools as it
import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._files import shown
from .._installed import Plugins, named, names_of
from .._misc import quoted
from ..data import located
from ._documents import Document
from ._formulas import NO_VALUE, formula_value, keys_of, parsed, parsed_text
from ._problems import Problems, Reader, is_off


# What a package adds is the path of its table.
_PLUGINS = Plugins("importers", "framework", pathlib.Path)
# The most percent of a step that is left out with a note.
MOST_LEFT_OUT = 10
# Of the keys of a file, how many say whose it is.
_MOST_LOOKED_AT = 2_000
# Scripts of other programs have more keys than that.
_MOST_UNKNOWN = 100
# Of a name with more sections only the last count.
_MOST_SECTIONS = 20
# Of these groups of keys without effect a note tells that they are left out.
_TOLD = ("data", "tokenizer", "logs")
# These have a dtype of fewer than 16 bits.
_NARROW = ("fp8-format", "fp8", "fp4-format", "fp4")
_DATA = ("data", "token", "logging", "wandb", "tensorboard")


class Meaning(NamedTuple):
    """What a key means.

    **Attributes:**

    - `kind`: its part of a framework's table.
    - `what`: the key that it sets, or what it costs.
    - `percent`: for a cost, the bound of its share of a step.
    - `source`: where the bound is from.
    """

    kind: str
    what: str
    percent: float = 0.0
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Framework:
    """A framework's table.

    **Attributes:**

    - `name`: the name of the framework.
    - `table`: its table as it is in the file.
    - `meanings`: what each of its keys means.
    """

    name: str
    table: Mapping[str, Any]
    meanings: Mapping[str, Meaning]
    beginnings: tuple[str, ...]

    def meaning(self, name: str) -> tuple[str, Meaning] | None:
        """The name in the table and the meaning of a key, whatever sections are before it."""
        parts = name.split(".")[-_MOST_SECTIONS:]
        shorter = [".".join(parts[i:]) for i in range(len(parts))]
        for short in shorter:
            if short in self.meanings:
                return short, self.meanings[short]
        for short in filter(lambda short: short.startswith(self.beginnings), shorter):
            begins = next(beginning for beginning in self.beginnings if short.startswith(beginning))
            return short, self.meanings[f"{begins}*"]
        return self._negated(parts[-1]) if "sets" in self.table or "like" in self.table else None

    def _negated(self, name: str) -> tuple[str, Meaning] | None:
        """The flag `no-x` or `disable-x` of a flag `x`, or the other way round."""
        for word in ("no-", "disable-"):
            for flag in (name.removeprefix(word), word + name):
                if flag in self.meanings:
                    meaning = self.meanings[flag]
                    effect = meaning.kind in ("sets", "same", "opposite")
                    target = meaning.what if meaning.kind in ("same", "opposite") else flag
                    kind = "same" if meaning.kind == "opposite" else "opposite"
                    negated = Meaning("no_effect", "negated")
                    return name, Meaning(kind, target) if effect else negated
        return None

    @property
    def is_megatron(self) -> bool:
        """Whether flags of Megatron-LM say the model and the batch."""
        return "megatron" in (self.name, self.table.get("like"))

    @property
    def marks(self) -> tuple[str, ...]:
        """Keys one of which a file of this framework has."""
        return tuple(usual(self.table["marks"]).split())


def usual(name: str) -> str:
    """A key in small letters, with dashes, and without those that sections begin with."""
    return re.sub(r"(^|\.)-+", r"\1", name.replace("_", "-").lower())


@ft.cache
def framework(name: str) -> Framework:
    """A framework by its name. Raises as `named`, or a `ValueError` for a table that is damaged."""
    path = named(_PLUGINS, _tables(), name)
    with located(shown(path)):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if missing := [key for key in ("marks", "title") if key not in table]:
            raise ValueError(f"the key `{missing[0]}` is missing; add it.")
    base = framework(table["like"]) if "like" in table else Framework("", {}, {}, ())
    meanings, own_values = dict(base.meanings), table.get("values", {})
    for part in ("values", "computed"):
        table[part] = {**base.table.get(part, {}), **table.get(part, {})}
    table["notes"] = [*table.get("notes", ()), *base.table.get("notes", ())]
    for kind in ("sets", "no_effect", "job"):
        for target, names in table.get(kind, {}).items():
            meanings |= dict.fromkeys(usual(names).split(), Meaning(kind, target))
    for kind in ("costs", "costs_in_fp8"):
        for target, cost in table.get(kind, {}).items():
            meaning = Meaning(kind, target, cost["percent"], cost["source"])
            meanings |= dict.fromkeys(usual(cost["keys"]).split(), meaning)
    for kind in ("same", "opposite"):
        for names, target in table.get(kind, {}).items():
            meanings |= dict.fromkeys(usual(names).split(), Meaning(kind, target))
    meanings |= {usual(key): Meaning("values", key) for key in own_values}
    beginnings = tuple(name[:-1] for name in meanings if name.endswith("*"))
    return Framework(name, table, meanings, beginnings)


@ft.cache
def framework_names() -> tuple[str, ...]:
    """The names of all frameworks, including those that other packages add."""
    return tuple(names_of(_PLUGINS, _tables()))


def _tables() -> dict[str, pathlib.Path]:
    """Those of this package, by their names, in the order of these."""
    paths = pathlib.Path(__file__).with_name("frameworks").glob("*.toml")
    return dict(sorted((path.stem, path) for path in paths))


def framework_of(document: Document) -> Framework | None:
    """The framework that a file is of: of those with one of its marks, that which knows the most of
    its keys.
    """
    names = {usual(key) for key in it.islice(document.keys, _MOST_LOOKED_AT)}
    best, most = None, (0, 0)
    for framework_name in framework_names():
        owner = framework(framework_name)
        marked = sum(1 for mark in owner.marks if any(_marks(mark, name) for name in names))
        if marked >= owner.table.get("least_marks", 1):
            num_meant = sum(1 for name in names if owner.meaning(name) is not None)
            if (num_meant, marked) > most:
                best, most = owner, (num_meant, marked)
    return best


def _marks(mark: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, mark) or name.endswith("." + mark)


@dataclasses.dataclass
class Arguments:
    """What files say in terms of Megatron-LM's flags.

    **Attributes:**

    - `flags`: the values of flags, without dashes, and of dotted keys of a job.
    - `origins`: for each of these, the key and the file that it came from.
    - `problems`: what is in the way, and what is left out with a note.
    """

    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    origins: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    problems: Problems = dataclasses.field(default_factory=Problems)

    def origin(self, target: str) -> str:
        """Where a flag, a key or a model is from, for a sentence."""
        key, file = self.origins.get(target, ("", ""))
        return f"`{key}` in {file}" if key else file

    def reader(self, strict: bool = False, replaced: Mapping[str, str] = {}) -> Reader:
        """Reads the flags; problems have the names in the files."""
        names = {flag: key for flag, (key, _) in self.origins.items() if key}
        return Reader(self.flags, strict, self.problems, names, replaced)


def translate(
    files: Iterable[tuple[Document, Framework]], leave_out: Iterable[str] = (), strict: bool = False
) -> Arguments:
    """What files say, the later ones before the earlier ones.

    **Arguments:**

    - `files`: each with its framework.
    - `leave_out`: keys that are left out, by the names that they have in the files.
    - `strict`: whether keys that are not known are refused; by default there is a note for each.
    """
    arguments, noted, costs, skipped = Arguments(), [], [], {usual(key): key for key in leave_out}
    files = [*files]
    for document, owner in files:
        unknown: list[str] = []
        for key, value in document.keys.items():
            name = usual(key)
            if value is None or _is_default(document, owner, name, value):
                continue
            if name in skipped or name.rpartition(".")[2] in skipped:
                arguments.problems.notes.append(f"`{key}` is left out, as asked.")
                skipped.pop(name, skipped.pop(name.rpartition(".")[2], None))
                continue
            known = owner.meaning(name)
            if known is None:
                data = not strict and any(word in name.rpartition(".")[2] for word in _DATA)
                # Whether a slip is meant is only looked for among as many as a person writes.
                data = data and (len(noted) > _MOST_UNKNOWN or not _near(name, owner))
                (noted if data else unknown).append(key)
            elif known[1].kind.startswith("costs"):
                costs.append((key, value, known[1]))
            elif known[1].kind == "no_effect":
                noted += [key] * (known[1].what in _TOLD)
                if known[1].what == "images":
                    arguments.problems.notes.append(
                        "Only the language model is imported, without what reads images or sound."
                    )
            else:
                _put(arguments, (key, document.name), _printed(document, value), known, owner)
        _tell_unknown(arguments.problems, unknown, owner, strict)
    for _, owner in files:
        for name, value in owner.table.get("defaults", {}).items():
            if name not in arguments.flags:
                arguments.flags[name] = value
                arguments.origins[name] = ("", f"by default of {owner.table['title']}")
    narrow = any(not is_off(arguments.flags.get(flag)) for flag in _NARROW)
    for key, value, meaning in costs:
        if is_off(value) or (meaning.kind == "costs_in_fp8" and not narrow):
            continue
        if meaning.percent > MOST_LEFT_OUT:
            arguments.problems.add(f"`{key}` ({meaning.what})", meaning.percent)
        else:
            arguments.problems.notes.append(
                f"`{key}` is left out: {meaning.what}, at most {meaning.percent:g} % of a step "
                f"({meaning.source})."
            )
    for key in skipped.values():
        arguments.problems.add(f"`--leave-out {key}`, a key that no file has")
    if noted:
        names = ", ".join(f"`{quoted(key, 60)}`" for key in noted[:4])
        and_more = f" and {len(noted) - 4} more" if len(noted) > 4 else ""
        arguments.problems.notes.append(
            f"Left out, because they name data, tokenizers or logs: {names}{and_more}."
        )
    return arguments


def megatron_reader(flags: Mapping[str, object], *, strict: bool = False) -> Reader:
    """Reads flags of Megatron-LM, by any of their names; see `Reader` for `strict`."""
    document = Document("arguments", "command", flags, flags)
    return translate([(document, framework("megatron"))], strict=strict).reader(strict)


def _is_default(document: Document, owner: Framework, name: str, value: Any) -> bool:
    """Whether a value says nothing: an option that is left to the program (`auto`), or a default
    that a program prints of an option that is off.
    """
    if document.kind == "arguments":
        # The encoder of a model without one is printed as the decoder is.
        twin = document.keys.get(name.replace("-", "_").replace("encoder_", ""))
        is_same = name in ("encoder-num-layers", "encoder-seq-length") and twin == value
        return is_same or str(owner.table.get("printed", {}).get(name)) == str(value)
    return value == "auto" and "sets" not in owner.table


def _printed(document: Document, value: Any) -> Any:
    """A value as it is written, of one that Python prints."""
    if document.kind != "arguments" or not isinstance(value, str):
        return value
    dtypes = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    word = dtypes.get(value, value)
    return word.partition(".")[2] if word.startswith(("AttnBackend.", "CudaGraph")) else word


def _put(
    arguments: Arguments,
    origin: tuple[str, str],
    value: Any,
    known: tuple[str, Meaning],
    owner: Framework,
) -> None:
    """Sets what a key means."""
    name, meaning = known
    key = origin[0]
    values: dict[str, Any] = {}
    if meaning.kind == "values":
        options = owner.table["values"][meaning.what]
        word = str(value).strip().lower()
        chosen = next((o for o in options if fnmatch.fnmatchcase(word, o.lower())), None)
        if chosen is None:
            allowed = ", ".join(f"`{option}`" for option in options)
            arguments.problems.add(f"`{key}` is {quoted(value)}, but known are only {allowed}")
            return
        if isinstance(options[chosen], str):
            arguments.problems.add(f"`{key}` {quoted(value)} ({options[chosen]})")
            return
        values = options[chosen]
    elif meaning.kind == "opposite":
        values = {meaning.what: is_off(value)}
    else:
        values = {name if meaning.kind == "sets" else meaning.what: value}
    for target, inner in values.items():
        before = arguments.flags.get(target, inner)
        if meaning.kind in ("sets", "same") and str(before) != str(inner):
            first, file = arguments.origins[target]
            arguments.problems.notes.append(
                f"`{key}` in {origin[1]} is {quoted(inner)}, and counts; `{first}` in {file} is "
                f"{quoted(before)}."
            )
        arguments.flags[target] = inner
        arguments.origins[target] = origin


def compute(arguments: Arguments, owner: Framework) -> None:
    """Sets what follows from what files say, and tells it, by the formulas of a framework's table:
    of flags, with underscores in their names, and of the keys of a job in `training`. A formula
    that has no value changes nothing.
    """

    def value_of(formula: str) -> tuple[Any, dict[str, Any], str]:
        """Its value, those of its keys, and of these the first that is from a file."""
        keys = {key: key.replace("_", "-") for key in sorted(keys_of(formula), key=formula.find)}
        values = {key: parsed_text(arguments.flags.get(flag)) for key, flag in keys.items()}
        values["training"] = {
            key.partition(".")[2]: parsed_text(value) for key, value in arguments.flags.items()
        }
        first = next((flag for flag in keys.values() if flag in arguments.origins), "")
        return formula_value(parsed(formula), values), values, first

    for formula, sentence in owner.table["notes"]:
        with contextlib.suppress(*NO_VALUE):
            value, values, first = value_of(formula)
            if value is not None:
                note = sentence.format(value=value, origin=arguments.origin(first), **values)
                arguments.problems.notes.append(note)
    for target, formula in owner.table["computed"].items():
        with contextlib.suppress(*NO_VALUE):
            value, _, first = value_of(formula)
            if value is None:
                arguments.flags.pop(target, None)
            elif value != arguments.flags.get(target):
                arguments.flags[target] = value
                if first:
                    arguments.origins.setdefault(target, arguments.origins[first])


def _tell_unknown(problems: Problems, unknown: list[str], owner: Framework, strict: bool) -> None:
    """Notes keys that are not known; those that are almost a known one are problems."""
    word = "flag" if owner.is_megatron else "key"
    if len(unknown) > _MOST_UNKNOWN:
        problem = f"{len(unknown)} {word}s that are not known here, as `{quoted(unknown[0], 60)}`"
        problems.add(problem)
        return
    for key in unknown:
        close_keys = _near(usual(key), owner)
        if close_keys:
            problems.add(
                f"`{quoted(key)}`, a {word} that is not known here (did you mean `{close_keys}`?)"
            )
        elif strict:
            problems.add(f"`{quoted(key)}`, a {word} that is not known here")
        else:
            problems.notes.append(
                f"The {word} `{quoted(key)}` is not known here, so it is left out."
            )


def _near(name: str, owner: Framework) -> str:
    """The known key that was probably meant: one that differs by a slip of the finger, or a flag
    that sets a key and whose name has more words.
    """
    effects = [names for names, meaning in owner.meanings.items() if meaning.kind != "no_effect"]
    slips = len(name) > 3 and difflib.get_close_matches(
        name, effects, 1, 1 - 1.01 / (len(name) - 1)
    )
    words = {*name.split("-")}
    longer = (names for names, m in owner.meanings.items() if m.kind == "sets" and len(words) > 1)
    return slips[0] if slips else next((n for n in longer if words < {*n.split("-")}), "")
