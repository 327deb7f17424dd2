"""The two models of DeBERTaV3, computed as in the published code: the encoder of `transformers` with their heads added.

Their parameters have the names of the published files.
"""

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput, TokenClassifierOutput

from electra_fast.huggingface.config import CLASSES


class MaskPredictions(nn.Module):
    """The head of the discriminator."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_BLD):
        states_BLD = self.LayerNorm(hidden_BLD[:, :1] + hidden_BLD)
        return self.classifier(nn.functional.gelu(self.dense(states_BLD))).squeeze(-1)


class ReplacedTokenDetectionModel(transformers.DebertaV2PreTrainedModel):
    """The discriminator."""

    def __init__(self, config):
        super().__init__(config)
        self.deberta = transformers.DebertaV2Model(config)
        self.mask_predictions = MaskPredictions(config)
        self.post_init()

    def forward(self, **inputs):
        return TokenClassifierOutput(logits=self.mask_predictions(self.deberta(**inputs).last_hidden_state))


class MaskedLanguageModel(transformers.DebertaV2ForMaskedLM):
    """The generator with its enhanced mask decoder."""

    def __init__(self, config):
        super().__init__(config)
        positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.deberta.embeddings.position_embeddings = positions
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        encoder = self.deberta.encoder
        embeddings = self.deberta.embeddings
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = embeddings.position_embeddings
        embeddings.position_embeddings = None
        hidden_BLD = self.deberta(input_ids, mask, output_hidden_states=True).hidden_states[-2]
        embeddings.position_embeddings = positions
        states_BLD = hidden_BLD + positions.weight[: input_ids.shape[1]]
        for _ in range(2):
            states_BLD, _ = encoder.layer[-1](
                hidden_BLD,
                encoder.get_attention_mask(mask),
                query_states=states_BLD,
                relative_pos=encoder.get_rel_pos(hidden_BLD),
                rel_embeddings=encoder.get_rel_embedding(),
            )
        head = self.cls if self.legacy else lambda x_BLD: self.lm_predictions(x_BLD, embeddings.word_embeddings)
        return MaskedLMOutput(logits=head(states_BLD))


def hf_class(architecture, role):
    """Returns the class of a role's folder, from `transformers` or this module."""
    if architecture != "deberta":
        return getattr(transformers, CLASSES[architecture, role])
    return ReplacedTokenDetectionModel if role == "discriminator" else MaskedLanguageModel
