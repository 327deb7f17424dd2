"""The recipes of fine-tuning in plain torch: learning rates, schedules, clipping and AdamW."""

import re

import torch


def rate_factor(name, recipe):
    """Returns the factor of layer decay 0.8 in an encoder of 2 layers. Embeddings have depth 0, layer i depth i + 1."""
    top = 4 if recipe == "google" else 3
    if name.startswith("head."):
        return 1.0
    match = re.search(r"encoder\.layer\.(\d+)\.", name)
    return 0.8 ** (top - (int(match[1]) + 1 if match else 0))


def schedule(recipe, t, total):
    if recipe == "google":
        return (1 - t / total) * min(1.0, t / (0.1 * total))
    warmup = int(0.1 * total)
    return min((t + 1) / warmup if warmup else 1.0, (total - t) / (total - warmup), 1.0)


def train(model, loss_of, order, recipe, learning_rate):
    """Trains a model with an encoder of `transformers` and other parameters named head.*.

    `loss_of` returns the loss of examples with the given numbers. `order` is [steps, batch_size], with -1 as padding.
    """
    decay = 0.0 if recipe == "paper" else 0.01
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for t, batch in enumerate(order):
        loss = loss_of([i for i in batch.tolist() if i >= 0])
        model.zero_grad()
        loss.backward()
        named = {name: p for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        for name, p in named.items():
            m, v = moments[name]
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            corrections = (1, 1) if recipe == "google" else (1 - 0.9 ** (t + 1), 1 - 0.999 ** (t + 1))
            update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-6)
            if not re.search(r"LayerNorm|bias", name):
                update += decay * p.detach()
            with torch.no_grad():
                p -= learning_rate * rate_factor(name, recipe) * schedule(recipe, t, len(order)) * update
