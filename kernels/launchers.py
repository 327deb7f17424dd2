"""All launchers that `electra_fast.ops` dispatches to, in one namespace; importing it imports Triton."""

from electra_fast.kernels.bias_gelu import bias_gelu, geglu
from electra_fast.kernels.corrupt import corrupt
from electra_fast.kernels.discriminator_head import discriminator_loss, gelu_logit
from electra_fast.kernels.dropout import dropout
from electra_fast.kernels.embedding_norm import embedding_norm
from electra_fast.kernels.generator_head import generator_head
from electra_fast.kernels.residual_norm import layer_norm, residual_norm
from electra_fast.kernels.sample_alias import sample_alias

__all__ = [
    "bias_gelu",
    "corrupt",
    "discriminator_loss",
    "dropout",
    "embedding_norm",
    "geglu",
    "gelu_logit",
    "generator_head",
    "layer_norm",
    "residual_norm",
    "sample_alias",
]
