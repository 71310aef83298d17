"""Models: a list of layers, each a list of modules."""

from typing import Annotated, Any, Literal

import msgspec

from ._types import Count, Label, Layers, Name


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal layers, one after the other.

    **Attributes:**

    - `modules`: what one of them is made of, in order: names of `Model.modules`, or of kinds.
    - `repeat`: how many there are.
    - `sequence_length`: where it is not that of the training, as in an encoder.
    """

    modules: tuple[Name, ...]
    repeat: Layers = 1
    sequence_length: Count | None = None


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder, or an encoder, or one before the other. In its short form, without `layers`, it is
    a dense transformer in the style of GPT or of Llama: `num_layers` of attention and MLP.

    **Attributes:**

    - `hidden_size`, `vocab_size`: its width and its words; none where its ends have no words.
    - `first`, `last`: modules before and after all layers, as names like those of `layers`: by
        default the embedding of words, and the head that predicts them.
    - `num_layers`: how many layers it has; the sum over `layers` where these are given.
    - `layers`: which layers, in order.
    - `modules`: the settings of each module of `layers`; `kind` is what it is, by default its name.
        Keys of the model below hold for all modules that have them and do not set them.
    - `num_heads`, `ffn_size`: of attention and MLP.
    - `num_kv_heads`: heads of keys and values; by default as many as queries.
    - `head_size`: by default `hidden_size / num_heads`.
    - `activation`: of the MLP; `swiglu` and `geglu` have a gate, so three matrices instead of two.
    - `position`, `max_positions`: learned embeddings, for `max_positions` of them, or rotary, or
        none.
    - `norm`: layer norm has a bias, RMS norm has none.
    - `bias`: whether linear layers have one.
    - `tied_embeddings`: whether the head shares the embedding's matrix.
    - `dropout`: whether hidden states and attention are dropped out.
    - `head_transforms`: dense layers of the model's width, each with an activation and a norm, that
        the head has besides its last norm: one in BERT, two with the pooler of its second task.
    - `num_mtp_layers`: further layers, like the last one, that predict the words after the next.
    - `name`, `source`: what it is called, and where the numbers are from.
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
    activation: Literal["gelu", "squared_relu", "swiglu", "geglu"] = "gelu"
    position: Literal["learned", "rotary", "none"] = "learned"
    max_positions: Count = 2048
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    tied_embeddings: bool = True
    dropout: bool = False
    head_transforms: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    num_mtp_layers: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    name: Label = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.layers and not self.num_layers:
            count = sum(layer.repeat for layer in self.layers)
            msgspec.structs.force_setattr(self, "num_layers", count)


def check_model(model: Model, where: str) -> None:
    """Raises a `ValueError` of one sentence where a model contradicts itself."""
    words = "embedding" in (model.first, model.last) or "head" in (model.first, model.last)
    if model.vocab_size == 0 and (words or model.num_mtp_layers):
        raise ValueError(
            f"{where}: the key `vocab_size` is missing; add it, or name ends without words as "
            "`first` and `last`."
        )
    if model.layers is None:
        if model.num_layers == 0:
            raise ValueError(f"{where}: the key `num_layers` is missing; add it, or `layers`.")
        if model.modules:
            raise ValueError(
                f"{where}: `modules` are those of `layers`, which is missing; add it, or use the "
                "short form without either."
            )
        return
    count = sum(layer.repeat for layer in model.layers)
    if count != model.num_layers:
        raise ValueError(
            f"{where}: `num_layers` is {model.num_layers}, but `layers` has {count}; leave "
            "`num_layers` out."
        )
    if not all(layer.modules for layer in model.layers):
        raise ValueError(f"{where}: `layers` has one without `modules`; name one at least.")
