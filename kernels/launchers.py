# ruff: noqa: F401
"""The launchers that `electra_fast.ops` calls; importing them imports Triton."""

from electra_fast.kernels.bias_gelu import bias_gelu, bias_gelu_backward, geglu, geglu_backward
from electra_fast.kernels.corrupt import corrupt
from electra_fast.kernels.discriminator_head import discriminator_loss, gelu_logit, token_logits
from electra_fast.kernels.dropout import dropout
from electra_fast.kernels.embedding_norm import embedding_norm
from electra_fast.kernels.generator_head import generator_head
from electra_fast.kernels.matmul_gelu import is_profitable as matmul_gelu_is_profitable
from electra_fast.kernels.matmul_gelu import matmul_geglu, matmul_geglu_backward, matmul_gelu, matmul_gelu_backward
from electra_fast.kernels.matmul_gelu import pipelines as matmul_gelu_pipelines
from electra_fast.kernels.narrow_feed_forward import narrow_feed_forward, narrow_feed_forward_backward
from electra_fast.kernels.narrow_feed_forward import supports as narrow_feed_forward_supports
from electra_fast.kernels.partial_sums import partial_sums
from electra_fast.kernels.residual_norm import layer_norm, residual_norm, residual_norm_backward
from electra_fast.kernels.rotary import rotary_backward, rotate_qkv_
from electra_fast.kernels.sample_alias import sample_alias
from electra_fast.kernels.short_attention import short_attention, short_attention_backward
from electra_fast.kernels.slot_states import slot_states
