"""Models of Hugging Face, by the keys of their `config.json`, as `models.toml` says."""

import ast
import dataclasses
import functools as ft
import itertools as it
import json
import pathlib
import tomllib

from .._misc import quoted
from ._formulas import formula_value, keys_of, parsed, parsed_text
from ._problems import MOST_LAYERS, Reader, Table


@ft.cache
def tables() -> Table:
    """The tables of `models.toml`."""
    text = pathlib.Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@ft.cache
def type_of(model_type: str) -> Table | None:
    """The table of a `model_type`, with what it inherits; `None` if there is none."""
    types, defaults = tables(), tables()["defaults"]
    name = types["same"].get(model_type, model_type)
    if name not in types or name in ("maps", "sections", "same", "defaults", "published"):
        return None
    table = types[name]
    if "like" in table:
        table = _merged(type_of(table["like"]) or {}, table)
    return table | {"defaults": defaults.get(model_type, defaults.get(name, {}))}


def _merged(base: Table, changes: Table) -> Table:
    inner = {
        key: _merged(base[key], changes[key])
        for key in base.keys() & changes.keys()
        if isinstance(base[key], dict) and isinstance(changes[key], dict)
    }
    return {**base, **changes, **inner}


def model_table(read: Reader, kind: Table, *, is_part: bool) -> Table:
    """The table `model` of a job.

    **Arguments:**

    - `read`: the keys of the file; gets problems and notes.
    - `kind`: the table of the type of the model.
    - `is_part`: whether the file is of a larger model, which leaves sizes to the defaults.
    """
    values = Values(read, kind, is_part)
    refused = [
        (clause, formula) for formula, clause in kind.get("refused", ()) if values.of(formula)
    ]
    if refused:
        keys = ((clause, values.said(formula)) for clause, formula in refused)
        read.problems += [f"{clause} ({said})" if said else clause for clause, said in keys]
        return {}
    model = values.table(kind["model"])
    count = values.of(kind["num_layers"])
    if not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
        given = values.said(kind["num_layers"])
        read.problems.append(f"{given}, but must be from 1 to {MOST_LAYERS}, as `model.num_layers`")
    for formula, sentence in kind.get("notes", ()):
        if values.of(formula):
            read.notes.append(sentence)
    if read.problems:
        return model
    assert isinstance(count, int)
    layers, modules = _layers(values, count)
    for key in dict.fromkeys(it.chain.from_iterable(map(keys_of, kind["layer"]))):
        entries = read.get(key)
        if isinstance(entries, list) and len(entries) > count:
            read.notes.append(
                f"`{key}` has {len(entries)} entries, of which the {count} of layers are read."
            )
    return model | {"layers": layers, "modules": modules}


def _layers(values: "Values", count: int) -> tuple[list[Table], dict[str, Table]]:
    """The layers, equal neighbours merged, and the settings of their modules. Where these differ
    from layer to layer, the names of further ones have a number.
    """
    kind, read = values.kind, values.read
    names: dict[str, str] = {}
    modules: dict[str, Table] = {}
    norms: dict[str, object] = {}

    def named(name: str, i: int) -> str:
        settings = {"norms": 1} | values.table(_settings(kind, name), i)
        text = json.dumps([name, settings], default=str)
        if text not in names:
            free = it.chain([name], (f"{name}-{number}" for number in it.count(2)))
            new = names[text] = next(new for new in free if new not in modules)
            norms[new] = settings.pop("norms")
            modules[new] = settings if new == name else {"kind": name} | settings
        return names[text]

    rows = []
    for i in range(count):
        row = [name for name in (values.of(formula, i) for formula in kind["layer"]) if name]
        unknown = [name for name in row if name not in kind["modules"]]
        read.problems += [f"layers of `{quoted(name)}`" for name in unknown]
        if read.problems:
            return [], {}
        rows.append(tuple(named(str(name), i) for name in row))
    layers = []
    for row, run in it.groupby(rows):
        of_row = [norms[name] for name in row]
        further = {} if of_row == [1] * len(row) else {"norms": of_row}
        layers.append({"modules": [*row], "repeat": len([*run]), **further})
    return layers, modules


def _settings(kind: Table, name: str) -> Table:
    """The formulas of a module's keys."""
    settings = dict(kind["modules"][name])
    base = settings.pop("like", None)
    return settings if base is None else _settings(kind, base) | settings


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of formulas of the keys of a file, as `models.toml` has them.

    **Attributes:**

    - `read`: the keys of the file; gets a problem for each formula that has no value.
    - `kind`: the table of the type of the model.
    - `is_part`: whether the file is of a larger model, which leaves sizes to the defaults.
    """

    read: Reader
    kind: Table
    is_part: bool

    def table(self, formulas: Table, i: int | None = None) -> Table:
        """The values by their keys, without those that are `None`."""
        values = {key: self.of(formula, i) for key, formula in formulas.items()}
        return {key: value for key, value in values.items() if value is not None}

    def of(self, formula: object, i: int | None = None) -> object:
        """The value of a formula in layer `i`. What is no formula stands for itself."""
        if not isinstance(formula, str) or not formula.startswith("="):
            return formula
        syntax, maps = parsed(formula), tables()["maps"]
        values = {key: self._key(key, i) for key in keys_of(formula) if key not in maps}
        if isinstance(syntax, ast.Name):
            name = self._name(syntax.id)
            value = values[syntax.id] if name in self.read or self.is_part else None
            if name not in self.read and value is not None:
                self.read.notes.append(f"`{name}` is {value}, as the type has it by default.")
            return self.read.whole(name, value)
        why = ""
        try:
            value = formula_value(syntax, {**maps, **values, "i": i})
            if isinstance(value, bool) or not isinstance(value, int | float):
                return value
            if value == int(value) and 0 <= value < 2**53:
                return int(value)
        except IndexError:
            why = f", of which one ends before layer {i}"
        except KeyError as error:
            why = f", of which {quoted(error.args[0], 40)} is not known"
        except (ArithmeticError, TypeError, ValueError):
            pass
        self.read.problems.append(self.said(formula) + why)
        return None

    def said(self, formula: str) -> str:
        """What the file says for the keys of a formula."""
        keys = [key for key in keys_of(formula) if key != "i" and key not in tables()["maps"]]
        values = {self._name(key): self._key(key) for key in keys}
        said = [
            f"`{key}` {quoted(value, 60)}" for key, value in values.items() if value is not None
        ]
        return ", ".join(said or [f"`{key}` is missing" for key in values])

    def _name(self, key: str) -> str:
        """The name that the file has for a key."""
        names = (*self.kind["names"].get(key, ()), key)
        return next((name for name in names if name in self.read), key)

    def _key(self, key: str, i: int | None = None) -> object:
        """The value of a key, which Transformers 5.24 may save for some layers by their numbers."""
        by_layer = self.read.get("per_layer_config", {})
        if isinstance(by_layer, dict) and i is not None:
            for number in (f"{i}", f"{i:02}", f"{i:03}"):
                if isinstance(of_layer := by_layer.get(number), dict) and key in of_layer:
                    return of_layer[key]
        names = (*self.kind["names"].get(key, ()), key)
        defaults = {} if any(map(self.read.says, names)) else self.kind["defaults"]
        default = next((defaults[name] for name in names if name in defaults), None)
        return parsed_text(self.read.get(self._name(key), default))
