"""Layers in a file of their own, to compare architectures of one job."""

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from .._files import shown
from .._misc import whole_number
from ._model import Layer, Model, check_layers
from ._override import Override
from ._read import located, read_struct
from ._types import MOST_LAYERS, Layers, Name


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of a model, without its width.

    **Attributes:**

    - `layers`, `modules`: as in `Model`.
    - `num_layers`: the depth to which the layers are repeated, if not once.
    - `source`: where the architecture is from.
    """

    layers: tuple[Layer, ...]
    modules: dict[Name, dict[str, Any]] = {}
    num_layers: Layers = 0
    source: str = ""


def load_architecture(path: str | os.PathLike[str]) -> Architecture:
    """Loads a file of `kind = "layers"`, its layers repeated to their depth. A `ValueError` of one
    sentence names the file and the key.
    """
    read = read_struct(path, "layers", Architecture)
    with located(shown(path)):
        check_layers(read.layers)
        layers = _repeated(read.layers, read.num_layers) if read.num_layers else read.layers
    return msgspec.structs.replace(read, layers=layers)


def put_layers(raw: dict[str, Any], overrides: Sequence[Override]) -> list[Override]:
    """Replaces the layers of a job's model by those of the file that an override names, if one
    does, in place. Returns the other overrides, which change what the file gives.

    The settings of the job's modules that the new layers do not name stay, because `first` and
    `last` may need them.
    """
    of_layers = [one for one in overrides if one.keys[0] == "layers"]
    if of_layers:
        with located(f"override `{of_layers[-1]}`"):
            _put(raw, of_layers)
    return [one for one in overrides if one.keys[0] != "layers"]


def _put(raw: dict[str, Any], overrides: Sequence[Override]) -> None:
    *earlier, override = overrides
    if earlier:
        raise ValueError(f"`{earlier[0]}` was given, too; give the file of layers once.")
    path = override.value
    if override.keys != ("layers",):
        raise ValueError(
            "`layers` names a file and has no keys of its own; give `layers=FILE`, or set a key of "
            "the model, such as `model.num_heads`."
        )
    if not isinstance(path, str) or not path:
        raise ValueError("it does not name a file; give that of an architecture: `layers=FILE`.")
    if not isinstance(raw.get("model"), dict):
        raise ValueError("the job has no model; leave `layers` out.")
    found = load_architecture(path)
    layers, depth = msgspec.to_builtins(found.layers), sum(layer.repeat for layer in found.layers)
    named = {name for layer in found.layers for name in layer.modules}
    given = raw["model"].get("modules")
    others = given.items() if isinstance(given, dict) else ()
    modules = {name: table for name, table in others if name not in named} | found.modules
    raw["model"] |= {"layers": layers, "modules": modules, "num_layers": depth}


def repeat_layers(model: Model, num_layers: int) -> Model:
    """The model with its layers, in their order, repeated to a depth (as Composer does,
    arXiv:2510.00379). Its parameters are those of its ends and a multiple of those of its layers.

    **Raises:**

    `ValueError` if the depth is not a whole number of at least one, or not a multiple of the number
    of layers.
    """
    num_layers = whole_number(num_layers, "num_layers", most=MOST_LAYERS)
    block = model.layers and _repeated(model.layers, num_layers)
    return msgspec.structs.replace(model, layers=block, num_layers=num_layers)


def _repeated(block: Sequence[Layer], num_layers: int) -> tuple[Layer, ...]:
    depth = sum(layer.repeat for layer in block)
    if num_layers % depth:
        raise ValueError(f"`num_layers` is {num_layers}, but must be a multiple of {depth} layers.")
    return tuple(block) * (num_layers // depth)
