from ._attention import Attention as Attention
from ._base import (
    AbstractModule as AbstractModule,
    Parameters as Parameters,
    make_module as make_module,
    modules as modules,
)
from ._compressed import CompressedAttention as CompressedAttention
from ._convolution import Convolution as Convolution, ResNetBlock as ResNetBlock
from ._core import Core as Core
from ._diffusion import PatchHead as PatchHead, StreamBlock as StreamBlock
from ._ends import Embedding as Embedding, Head as Head, Projection as Projection
from ._gated_delta import GatedDelta as GatedDelta
from ._gather import gradients as gradients, norm_parameters as norm_parameters
from ._layer_inputs import PerLayerInput as PerLayerInput
from ._mamba import Mamba as Mamba
from ._mla import MLA as MLA
from ._mlp import MLP as MLP, gate_factor as gate_factor
from ._moe import MoE as MoE
from ._operators import Operator as Operator, norm_name as norm_name
from ._recommender import EmbeddingBags as EmbeddingBags
from ._short_mixers import LightningAttention as LightningAttention, Mamba1 as Mamba1
