"""Dense decoder models."""

from typing import Literal

import msgspec

from ._types import Count, Label, Layers


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dense decoder-only transformer, in the style of GPT or of Llama.

    **Attributes:**

    - `num_layers`, `hidden_size`, `num_heads`, `ffn_size`, `vocab_size`: its shape.
    - `num_kv_heads`: heads of keys and values; by default as many as queries.
    - `head_size`: by default `hidden_size / num_heads`.
    - `activation`: of the MLP; `swiglu` has a gate, so three matrices instead of two.
    - `position`: learned embeddings, for `max_positions` of them, or rotary.
    - `norm`: layer norm has a bias, RMS norm has none.
    - `bias`: whether linear layers have one.
    - `tied_embeddings`: whether the head shares the embedding's matrix.
    - `dropout`: whether hidden states and attention are dropped out.
    - `name`, `source`: what it is called, and where the numbers are from.
    """

    num_layers: Layers
    hidden_size: Count
    num_heads: Count
    ffn_size: Count
    vocab_size: Count
    num_kv_heads: Count | None = None
    head_size: Count | None = None
    activation: Literal["gelu", "swiglu"] = "gelu"
    position: Literal["learned", "rotary"] = "learned"
    max_positions: Count = 2048
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    tied_embeddings: bool = True
    dropout: bool = False
    name: Label = ""
    source: str = ""

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def gate_factor(self) -> int:
        """Matrices that read the MLP's input: two with a gate."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def layer_matmul_parameters(self) -> int:
        """Parameters of one layer that are multiplied with every token."""
        h = self.hidden_size
        attention = 2 * h * (self.num_heads + self.kv_heads) * self.head_dim
        return attention + (self.gate_factor + 1) * h * self.ffn_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * (2 if self.norm == "layernorm" else 1)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        biases = (self.num_heads + 2 * self.kv_heads) * self.head_dim + self.hidden_size
        biases += self.gate_factor * self.ffn_size + self.hidden_size
        return (
            self.layer_matmul_parameters + 2 * self.norm_parameters + (biases if self.bias else 0)
        )

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of words and, where they are learned, positions."""
        positions = self.max_positions if self.position == "learned" else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        head = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        layers = self.num_layers * self.layer_parameters
        return self.embedding_parameters + layers + self.norm_parameters + head
