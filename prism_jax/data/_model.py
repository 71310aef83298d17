"""Models: a list of layers, each a list of modules; and layers in a file of their own, to compare
architectures of one job.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from .._files import shown
from .._misc import whole_number
from ._read import located, read_struct
from ._types import MOST_LAYERS, Count, Label, Layers, Name


Norm = Literal[
    "layernorm", "layernorm-without-bias", "rmsnorm", "zero-centered-rmsnorm", "without-weights"
]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive equal layers.

    **Attributes:**

    - `modules`: the modules of a layer, in order: names in `Model.modules`, or kinds of modules.
    - `repeat`: how many of these layers there are.
    - `norms`: how many norms of the hidden states each module has, by default one: none if it reads
        that of the module before it (parallel blocks, as in Falcon), two if there is another of its
        output (as in Gemma 2). If there is only one of its output, as in OLMo 2, it is one.
    - `sequence_length`: the sequence length of these layers, if it is not that of the training, as
        in an encoder; for images the number of their pixels or patches.
    - `hidden_size`: the width of these layers, if it is not that of the model; stages of several
        pipeline ranks need one width.
    - `frozen`: whether these layers are not trained, as encoders of texts or images: they run
        forward only, before all layers that are trained, and each replica has all of them. If the
        first have no `sequence_length` and no width of their own, `first` feeds them and is not
        trained either.
    """

    modules: tuple[Name, ...]
    repeat: Layers = 1
    norms: tuple[Literal[0, 1, 2], ...] | None = None
    sequence_length: Count | None = None
    hidden_size: Count | None = None
    frozen: bool = False


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder, an encoder, or an encoder followed by a decoder. The short form, without `layers`,
    is a dense transformer in the style of GPT or Llama: `num_layers` layers of attention and MLP.

    **Attributes:**

    - `hidden_size`: the width of the hidden states.
    - `vocab_size`: the number of tokens in the vocabulary; 0 if the model neither embeds nor
        predicts tokens.
    - `first`: the module before all layers, named as in `layers`; by default the token embedding.
    - `last`: the module after all layers, named as in `layers`; by default the head that predicts
        tokens.
    - `num_layers`: the number of layers; if `layers` are given, by default their sum.
    - `layers`: the layers, in order.
    - `modules`: the settings of each module that `layers` name; `kind` is the kind of module, by
        default its name. Keys of the model, such as `num_heads`, hold for all modules that have
        them and do not set them.
    - `num_heads`: the number of attention heads.
    - `ffn_size`: the intermediate size of the MLP.
    - `num_kv_heads`: the number of heads of keys and values; by default `num_heads`.
    - `head_size`: the size of an attention head; by default `hidden_size / num_heads`.
    - `activation`: the activation of the MLP; `swiglu` and `geglu` have a gate, so three matrices
        instead of two. `gelu_new` is that of GPT-2 in Transformers, which runs op by op if no
        compiler fuses it.
    - `position`: how positions are encoded: by learned embeddings, rotary, or not at all.
    - `max_positions`: the number of learned position embeddings.
    - `norm`: the normalisation: layer norm has a weight and a bias for each value, RMS norm and
        `layernorm-without-bias` a weight, and `without-weights` neither. `zero-centered-rmsnorm`
        multiplies by one and the weight, in float32 (Gemma).
    - `bias`: whether linear layers have a bias.
    - `tied_embeddings`: whether the head shares the matrix of the embedding.
    - `dropout`: whether there is dropout of hidden states and attention.
    - `head_transforms`: the number of dense layers of the model's width, each with an activation
        and a norm, that the head has besides its last norm: one in BERT, two with the pooler of its
        second task.
    - `hyper_connections`: the number of residual streams, which manifold-constrained
        hyper-connections mix around each module (DeepSeek V4); by default one.
    - `num_mtp_layers`: the number of multi-token-prediction layers, which are like the last layer
        and predict the tokens after the next.
    - `guessed`: whether the layers are guessed from the names of keys of a configuration whose type
        is not known; the expected error is then that of a class without measured steps.
    - `name`: the name of the model.
    - `title`: what the model is called in headers; by default its name.
    - `source`: where the numbers are from.
    """

    hidden_size: Count
    vocab_size: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    first: Name = "embedding"
    last: Name = "head"
    num_layers: Layers = 0
    num_heads: Count | None = None
    ffn_size: Count | None = None
    num_kv_heads: Count | None = None
    head_size: Count | None = None
    layers: tuple[Layer, ...] | None = None
    modules: dict[Name, dict[str, Any]] | None = None
    activation: Literal["gelu", "gelu_new", "relu", "squared_relu", "swiglu", "geglu"] = "gelu"
    position: Literal["learned", "rotary", "none"] = "learned"
    max_positions: Count = 2048
    norm: Norm = "layernorm"
    bias: bool = True
    tied_embeddings: bool = True
    dropout: bool = False
    head_transforms: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    hyper_connections: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    num_mtp_layers: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    guessed: bool = False
    name: Label = ""
    title: Label = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.layers and not self.num_layers:
            count = sum(layer.repeat for layer in self.layers)
            msgspec.structs.force_setattr(self, "num_layers", count)

    @property
    def kinds(self) -> set[str]:
        """The kinds of its modules."""
        names = {name for layer in self.layers or () for name in layer.modules}
        tables = self.modules or {}
        names |= {self.first, self.last}
        return {str(tables.get(name, {}).get("kind", name)) for name in names}


def check_model(model: Model) -> None:
    """Raises a `ValueError` of one sentence if the keys of a model contradict each other."""
    has_words = bool({model.first, model.last} & {"embedding", "head"})
    if model.vocab_size == 0 and (has_words or model.num_mtp_layers):
        raise ValueError(
            "the key `vocab_size` is missing; add it, or give `first` and `last` modules without a "
            "vocabulary."
        )
    if model.layers is None:
        if model.num_layers == 0:
            raise ValueError("the key `num_layers` is missing; add it, or `layers`.")
        if model.modules:
            raise ValueError(
                "`modules` has settings for `layers`, which is missing; add `layers`, or use the "
                "short form without either."
            )
        return
    check_layers(model.layers)
    count = sum(layer.repeat for layer in model.layers)
    if count != model.num_layers:
        raise ValueError(
            f"`num_layers` is {model.num_layers}, but `layers` has {count}; leave `num_layers` out."
        )


def check_layers(layers: Sequence[Layer]) -> None:
    """Raises a `ValueError` of one sentence if there are no layers, too many, or empty ones."""
    if not layers:
        raise ValueError("`layers` is empty; give at least one.")
    if not all(layer.modules for layer in layers):
        raise ValueError("`layers` has an entry without `modules`; name at least one.")
    for layer in layers:
        if layer.norms is not None and len(layer.norms) != len(layer.modules):
            raise ValueError(
                f"`layers` has {len(layer.norms)} `norms` for {len(layer.modules)} modules; give "
                "one number for each."
            )
    count = sum(layer.repeat for layer in layers)
    if count > MOST_LAYERS:
        raise ValueError(f"`layers` has {count:,} layers; give at most {MOST_LAYERS:,}.")


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
