"""Models of Megatron-LM with an encoder: BERT, and T5, which also has a decoder."""

from typing import Any

from ._problems import Reader


Table = dict[str, Any]

_WORD_PIECE = ("bert", "vocab.txt")


def is_encoder(read: Reader) -> bool:
    """Whether the arguments are of BERT, as its vocabulary or `bert-no-binary-head` shows."""
    words = read.text("vocab-file").startswith(_WORD_PIECE)
    return not has_encoder(read) and (words or read.flag("bert-no-binary-head"))


def has_encoder(read: Reader) -> bool:
    """Whether the arguments are of T5."""
    return "encoder-num-layers" in read


def encoder_and_decoder(read: Reader) -> tuple[list[Table], Table]:
    """The layers of T5 and their modules. The encoder has a sequence length of its own."""
    length = read.count("encoder-seq-length", read.count("seq-length", 512))
    if read.count("pipeline-model-parallel-size", 1) > 1:
        read.problems.append("a pipeline whose first stages are an encoder")
    layers = [
        {
            "modules": ["encoder_attention", "mlp"],
            "repeat": read.count("encoder-num-layers"),
            "sequence_length": length,
        },
        {
            "modules": ["attention", "cross_attention", "mlp"],
            "repeat": read.count("decoder-num-layers", read.count("encoder-num-layers")),
        },
    ]
    modules = {
        "encoder_attention": {"kind": "attention", "causal": False},
        "cross_attention": {"kind": "attention", "causal": False, "context_length": length},
    }
    return layers, modules
