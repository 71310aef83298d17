"""Operators of a framework that runs each as kernels of their own: lists of these, as data."""

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from .._files import shown
from .._misc import quoted
from ._read import find_file, located, read_toml
from ._types import Label, Text, convert


_Phase: TypeAlias = Literal["forward", "backward", "weights", "kept", "kept_for_weights"]


class ByteTerm(NamedTuple):
    """Bytes that a kernel moves, or that are kept: so many for each of some values.

    **Attributes:**

    - `rate`: the class of the kernel, a kind in the tables of efficiencies; empty for what is kept.
    - `num_bytes`: the bytes for each value.
    - `values`: which values: a letter of the file.
    """

    rate: str
    num_bytes: float
    values: str


class Operators(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operators of a framework.

    **Attributes:**

    - `source`: where the lists are from.
    - `libraries`: the year of the libraries, whose kernels are in `kernels/DEVICE-YEAR`.
    - `fp32`, `bf16`: operators by name, for weights in float32 with autocast, and in bf16. Of each
        the kernels of its `forward`, its `backward` and the gradients of its `weights` in their
        order, as `vector 8 h`: the class of the rate, the bytes for each value, and which values;
        and what autograd keeps, as `8 h`, which it needs besides for the gradients of weights.
    - `classes`: by name kernels of profiles: an expression that their names fit, of which the first
        counts, and the classes of these lists that they are.
    - `masked`: whether attention has a mask as a tensor, so that it covers the whole square, and
        keys that are repeated for each query.
    - `name`: the name of the file.
    """

    source: Text
    libraries: Text
    fp32: dict[str, dict[_Phase, tuple[Text, ...]]]
    bf16: dict[str, dict[_Phase, tuple[Text, ...]]]
    classes: dict[Label, tuple[Text, Text]] = {}
    masked: bool = False
    name: Label = ""

    def terms(self, weights: str, name: str, phase: _Phase) -> list[ByteTerm]:
        """The entries of an operator, if there are some. A `ValueError` of one sentence for an
        entry that is none.
        """
        operators = self.bf16 if weights == "bf16" else self.fp32
        return [
            _term(entry, rated=not phase.startswith("kept"))
            for entry in operators.get(name, {}).get(phase, ())
        ]


def load_operators(name: str) -> Operators:
    """Loads the operators of a framework by the name of a shipped file, or by a path.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("list of operators", name)
    raw = read_toml(path, "operators")
    raw.setdefault("name", quoted(path.stem))
    loaded = convert(raw, Operators, lambda key: shown(path))
    with located(shown(path)):
        for weights in ("fp32", "bf16"):
            for name, entries in getattr(loaded, weights).items():
                for phase in entries:
                    loaded.terms(weights, name, phase)
    return loaded


def _term(entry: str, *, rated: bool) -> ByteTerm:
    words = entry.split()
    rate = words.pop(0) if rated and len(words) == 3 else ""
    try:
        num_bytes, values = words
        return ByteTerm(rate, float(num_bytes), values)
    except ValueError:
        raise ValueError(
            f"`{quoted(entry)}` is no entry of an operator; give a class of kernels, bytes and "
            "values, as `vector 8 h`, or of what is kept bytes and values, as `8 h`."
        ) from None
