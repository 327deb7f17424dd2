"""Every objective, and every option that changes its computation, as configuration keys by name; random weights."""

import torch

from electra_fast.config.config import Config
from electra_fast.config.presets import OBJECTIVE_SPECS


def needs(name):
    """Returns the keys that an objective needs, with values as on a command line."""
    changes = {"objective.name": name}
    for key, allowed in OBJECTIVE_SPECS[name].needs.items():
        if Config.preset("tiny", "google").value(key) not in allowed:
            changes[key] = str(allowed[0])
    return changes


VARIANTS = {name: needs(name) for name in OBJECTIVE_SPECS} | {
    "electra15, random positions": needs("electra15") | {"objective.disc_positions": "random"},
    "contrastive": {"objective.contrastive_weight": "2", "data.masking": "tokens"},
    "corrective": {"objective.corrective_weight": "3"},
    "uniform": {"generator.kind": "uniform"},
    "unigram": {"generator.kind": "unigram"},
    "replace-mlm, unigram": needs("replace-mlm") | {"generator.kind": "unigram"},
    "plain heads": {"model.heads": "plain"},
    "adversarial, plain heads": needs("adversarial") | {"model.heads": "plain"},
}

# Together these use every operation of all variants; for tests that take seconds per variant.
DIFFERENT = {
    "electra15, unigram": VARIANTS["electra15, random positions"] | VARIANTS["unigram"],
    "contrastive, corrective": VARIANTS["contrastive"] | VARIANTS["corrective"],
} | {name: VARIANTS[name] for name in ("electra", "all-tokens-mlm", "two-stage", "adversarial, plain heads")}


def randomized(model, seed):
    """Sets every parameter to random values, norms about 1 and biases not 0, so that any omission changes results."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            scale = 0.2 if parameter.dim() == 1 else 0.8 * parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=random) * scale + is_norm)
    return model.eval()
