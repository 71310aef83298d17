"""Published batches of models that a configuration describes without its training."""

from typing import NamedTuple

from ._problems import Table


class Batch(NamedTuple):
    """A batch of pre-training, the last where it grew.

    **Attributes:**

    - `sequences`: the number of sequences in a step.
    - `length`: the number of tokens in each.
    - `source`: who published it.
    """

    sequences: int
    length: int
    source: str


# By `model_type`, width, number of layers and size of the vocabulary. Touvron et al. 2023 say 4
# million tokens for all sizes, Moonshot AI 67 million and Zhipu AI 64 million.
_LLAMA_2 = Batch(1024, 4096, "Touvron et al. 2023, arXiv:2307.09288")
_PUBLISHED = {
    ("llama", 4096, 32, 32000): _LLAMA_2,
    ("llama", 5120, 40, 32000): _LLAMA_2,
    ("llama", 8192, 80, 32000): _LLAMA_2,
    ("llama", 16384, 126, 128256): Batch(2048, 8192, "Llama 3, arXiv:2407.21783"),
    ("deepseek_v2", 2048, 27, 102400): Batch(4608, 4096, "DeepSeek-V2, arXiv:2405.04434"),
    ("deepseek_v2", 5120, 60, 102400): Batch(9216, 4096, "DeepSeek-V2, arXiv:2405.04434"),
    ("deepseek_v3", 7168, 61, 129280): Batch(15360, 4096, "DeepSeek-V3, arXiv:2412.19437"),
    ("kimi_k2", 7168, 61, 163840): Batch(16384, 4096, "Kimi K2, arXiv:2507.20534"),
    ("glm4_moe", 5120, 92, 151552): Batch(16384, 4096, "GLM-4.5, arXiv:2508.06471"),
    ("gpt2", 1600, 48, 50257): Batch(512, 1024, "Radford et al. 2019"),
}


def published_batch(kind: str, model: Table) -> Batch | None:
    """The batch of a model of a `model_type`, if its shape is that of a published one.

    **Arguments:**

    - `model`: the table of the model in a job.
    """
    layers = model.get("num_layers") or sum(layer["repeat"] for layer in model["layers"])
    return _PUBLISHED.get((kind, model["hidden_size"], layers, model["vocab_size"]))
