"""Fine-tuning: adapters that are trained in the place of matrices, and packed sequences."""

import math
import typing
from typing import Annotated, Literal, TypeAlias

import msgspec

from ._types import Count


AdaptedMatrix: TypeAlias = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
_ALL = typing.get_args(AdaptedMatrix)


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adapters of low rank (LoRA, Hu et al. 2021, arXiv:2106.09685), which are trained instead of
    all of the model: a matrix of `rank` rows reads what the adapted matrix reads, and what another
    makes of that is scaled and added. All else is frozen.

    **Attributes:**

    - `rank`: the number of values between the two matrices.
    - `modules`: which matrices have adapters, in the terms of Megatron-Core: those of queries, keys
        and values together (`linear_qkv`), of what attention returns (`linear_proj`), and the first
        and the last of MLPs and experts (`linear_fc1`, `linear_fc2`); by default all of these.
        Latent attention has only `linear_proj`.
    - `dropout`: whether there is a dropout before the adapters.
    """

    rank: Count = 16
    modules: Annotated[tuple[AdaptedMatrix, ...], msgspec.Meta(min_length=1)] = _ALL
    dropout: bool = False


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The law of the lengths of sequences.

    **Attributes:**

    - `mean`: the mean number of tokens.
    - `sigma`: of the family `lognormal`, the standard deviation of the logarithm.
    - `family`: `lognormal` or, if all are equal, `constant`.
    """

    mean: Annotated[float, msgspec.Meta(ge=1, le=1e9)]
    sigma: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.0
    family: Literal["lognormal", "constant"] = "lognormal"

    def moment(self, power: int, most: float) -> float:
        """The mean of a power of lengths, of which none exceeds `most`."""
        sigma = 0.0 if self.family == "constant" else self.sigma
        if sigma == 0:
            return min(self.mean, most) ** power
        # Of the logarithm, in units of its deviation, how far the limit is above the mean.
        limit = math.log(most / self.mean) / sigma + sigma / 2
        below = (self.mean * math.exp((power - 1) * sigma**2 / 2)) ** power
        return below * _normal(limit - power * sigma) + most**power * _normal(-limit)


class Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sequences that are packed, one after the other, into sequences of `sequence_length` tokens.
    Tokens attend to those of their own sequence alone.

    **Attributes:**

    - `lengths`: the law of their lengths. Those that are longer than `sequence_length` are cut.
    """

    lengths: Lengths

    def mean_length(self, sequence_length: int) -> float:
        """The mean length of the sequence that a token is in: the sum of squares of lengths over
        their sum.
        """
        first, second = (self.lengths.moment(power, sequence_length) for power in (1, 2))
        return second / first

    def spread(self, sequence_length: int, tokens: int) -> float:
        """The standard deviation, over the mean, of the sum of squares of the lengths that fill so
        many tokens; of many independent ones, as of a renewal process with rewards.
        """
        moments = (self.lengths.moment(power, sequence_length) for power in (1, 2, 3, 4))
        first, second, third, fourth = moments
        mean = second / first
        variance = fourth - 2 * mean * third + mean**2 * second
        return math.sqrt(max(variance, 0.0) / (first * tokens)) / mean


def _normal(score: float) -> float:
    """The probability that a standard normal is below a score."""
    return math.erfc(-score / math.sqrt(2)) / 2
