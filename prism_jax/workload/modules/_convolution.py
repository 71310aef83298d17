"""Convolutions of images, and the block of a U-Net that is made of two of them.

The `sequence_length` of a layer is the number of pixels that its convolutions write, and its
`hidden_size` their channels. Convolutions read the pixels beside their own, and the halves of a
U-Net are connected, so that images and stages are not split: they are data parallel.
"""

import dataclasses
from typing import ClassVar

from ...cluster import compute_latency
from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear
from .._costs import Costs
from ._base import AbstractSampleModule, Parameters
from ._gather import check_data_parallel


def convolve(costs: Costs, outputs: int, inputs: int, size: int = 3, stride: int = 1) -> Linear:
    """The kernels of a convolution with `size` x `size` weights from `inputs` to `outputs`
    channels, and their gradients. It reads `stride**2` pixels for each that it writes.

    It is an implicit product (Chetlur et al. 2014, arXiv:1410.0759): each output takes `size**2 *
    inputs` multiply-adds, of which only the images and the weights are read and written. It takes
    as long as the device's table of `convolution` says, or else as a product of as many operations.
    """
    pixels, dtype = costs.tokens, costs.base_dtype
    weights = size**2 * inputs * outputs
    flop, value_bytes = 2 * pixels * weights, costs.activation_bytes
    images = value_bytes * pixels * (stride**2 * inputs + outputs)
    measured = costs.kernels.find_efficiency("convolution", dtype) is not None
    table, on = "convolution" if measured else "gemm", (costs.cluster.device, costs.kernels)
    batch = costs.training.microbatch_size
    name = f"{dtype} {batch}x{pixels // batch}x{outputs}x{inputs} {size}x{size}/{stride}"

    def kernel(phase: str, weight_bytes: int) -> Kernel:
        mean = compute_latency(table, dtype, flop, images + weight_bytes * weights, *on)
        return Kernel("convolution", f"{name} {phase}", mean, flop=flop)

    # The gradients of weights are added in float32.
    return Linear(kernel("forward", value_bytes), kernel("dgrad", value_bytes), kernel("wgrad", 8))


def normed(
    costs: Costs, values: int, *, backward: bool, norm: bool = True, silu: bool = True
) -> list[Kernel]:
    """A group norm, which reads its input for the statistics and once more, and a SiLU."""
    of_norm, of_silu = (5, 3) if backward else (3, 2)
    kernels = [costs.move_values("norm", of_norm * values)] * norm
    return kernels + [costs.move_values("elementwise", of_silu * values)] * silu


@dataclasses.dataclass(frozen=True)
class Convolution(AbstractSampleModule):
    """A convolution with a bias. As the last module of a model, its loss takes no time.

    **Attributes:**

    - `in_channels`, `out_channels`: the channels that it reads and writes; by default the hidden
        size.
    - `kernel_size`: the width and height of its weights, in pixels.
    - `stride`: how many times as many pixels its input has in each direction.
    - `upsample`: whether its input has half as many pixels in each direction, which are repeated.
    - `group_norm`, `silu`: whether a group norm stands before it, and a SiLU behind that or alone.
    - `residual`: whether its output is added to what came before.
    """

    kind: ClassVar[str] = "convolution"

    in_channels: Count | None = None
    out_channels: Count | None = None
    kernel_size: Count = 3
    stride: Count = 1
    upsample: bool = False
    group_norm: bool = False
    silu: bool = False
    residual: bool = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_data_parallel(self.kind, layout)
        if self.upsample and self.stride > 1:
            raise ValueError(
                f"`convolution` has `upsample` and `stride` = {self.stride}, which would leave out "
                "the pixels that it repeats; use one of the two."
            )

    def parameters(self, model: Model) -> Parameters:
        inputs, outputs = self._channels(model)
        weights = (self.kernel_size**2 * inputs + 1) * outputs
        return Parameters(copied=weights + 2 * inputs * self.group_norm)

    def activations(self, costs: Costs) -> dict[str, float]:
        # Its input, and those of the norm and of the SiLU.
        tensors = 1 + self.group_norm + self.silu
        return {"convolution": tensors * costs.activation_bytes * self._read(costs)}

    def linears(self, costs: Costs) -> list[Linear]:
        inputs, outputs = self._channels(costs.model)
        return [convolve(costs, outputs, inputs, self.kernel_size, self.stride)]

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        values, before = self._read(costs), {"norm": self.group_norm, "silu": self.silu}
        kernels = normed(costs, values, backward=backward, **before)
        # Of four pixels one is read, or the gradient of one written.
        sizes = [1.25 * values] * self.upsample
        sizes += [3 * costs.tokens * self._channels(costs.model)[1]] * self.residual
        return kernels + [costs.move_values("elementwise", size) for size in sizes]

    def _channels(self, model: Model) -> tuple[int, int]:
        return self.in_channels or model.hidden_size, self.out_channels or model.hidden_size

    def _read(self, costs: Costs) -> int:
        """The values of its input."""
        return costs.tokens * self.stride**2 * self._channels(costs.model)[0]


@dataclasses.dataclass(frozen=True)
class ResNetBlock(AbstractSampleModule):
    """The block of a U-Net or an autoencoder: twice a group norm, a SiLU and a convolution of 3 x 3
    pixels, between which a matrix of the time step's embedding is added, and a residual (Rombach et
    al. 2022, arXiv:2112.10752; openaimodel.py). Where channels change, the residual passes through
    a convolution of one pixel.

    **Attributes:**

    - `in_channels`: the channels of its input; by default the hidden size, which it writes.
    - `skip_channels`: the channels beside these that come from the other half of the U-Net.
    - `time_size`: the width of the time step's embedding; by default there is none.
    """

    kind: ClassVar[str] = "resnet-block"

    in_channels: Count | None = None
    skip_channels: Count | None = None
    time_size: Count | None = None

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_data_parallel(self.kind, layout)

    def parameters(self, model: Model) -> Parameters:
        inputs, outputs = self._channels(model)
        total = 2 * inputs + (9 * inputs + 1) * outputs + 2 * outputs + (9 * outputs + 1) * outputs
        total += (self.time_size + 1) * outputs if self.time_size else 0
        return Parameters(copied=total + (inputs != outputs) * (inputs + 1) * outputs)

    def activations(self, costs: Costs) -> dict[str, float]:
        # The inputs of norms, SiLUs and convolutions.
        values = 3 * costs.tokens * sum(self._channels(costs.model))
        return {"convolution": costs.activation_bytes * values}

    def linears(self, costs: Costs) -> list[Linear]:
        inputs, outputs = self._channels(costs.model)
        batch, linears = costs.training.microbatch_size, [convolve(costs, outputs, inputs)]
        if self.time_size:
            linears.append(costs.linear(batch, outputs, self.time_size, costs.base_dtype))
        linears.append(convolve(costs, outputs, outputs))
        return linears + [convolve(costs, outputs, inputs, 1)] * (inputs != outputs)

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        read, written = (costs.tokens * channels for channels in self._channels(costs.model))
        kernels = [
            kernel for n in (read, written) for kernel in normed(costs, n, backward=backward)
        ]
        # Halves are joined, or their gradients parted; time is added, and the residual.
        sizes = [2 * read] * bool(self.skip_channels) + [2 * written] * bool(self.time_size)
        return kernels + [costs.move_values("elementwise", n) for n in (*sizes, 3 * written)]

    def _channels(self, model: Model) -> tuple[int, int]:
        inputs = (self.in_channels or model.hidden_size) + (self.skip_channels or 0)
        return inputs, model.hidden_size
