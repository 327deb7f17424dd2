"""Update rules and schedules: AdamW (with and without bias correction), LAMB, Muon.

One optimizer holds fp32 moments by parameter name, so that its state is a flat dictionary of
tensors that a checkpoint can store. Each rule follows its source to the letter: AdamW without
bias correction as in BERT's and ELECTRA's published code, LAMB as You et al. (2020), Muon as Jordan
et al. (2024) with the five-step Newton-Schulz iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from electra_fast.config import OptimizerConfig

_NOT_MATRICES = (".token", ".position", ".token_type", "classifier.weight")


def schedule_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The learning rate's share of its peak at a step (0-based) of `num_steps`.

    `product`: (1 - t/T) * min(1, t/W), the published code's. `linear`: up over W steps, then down to 0.
    """
    warmup = config.num_warmup_steps(num_steps)
    if config.schedule == "product":
        return (1 - step / num_steps) * (min(1.0, step / warmup) if warmup else 1.0)
    rising = (step + 1) / warmup if warmup else 1.0
    falling = (num_steps - step) / max(1, num_steps - warmup)
    return min(1.0, rising, falling)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all tensors together: fp32 scalar."""
    norm: Tensor = torch.stack(torch._foreach_norm(list(tensors))).norm()
    return norm


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nearest (semi-)orthogonal matrices, roughly, by five Newton-Schulz steps in `dtype`; [K, rows, columns].

    The result is of the matrices' own dtype. The iteration tolerates bf16 (Jordan et al., 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


class Optimizer:
    """Updates named parameters in place from their `.grad`."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = dict(named_parameters)
        self.matrices = self._muon_names()
        self.moments = [name for name in self.parameters if name not in self.matrices]
        self.num_updates = 0
        self.first = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(self.parameters[name], dtype=torch.float32) for name in self.moments}
        # What changes from step to step, on the device: -learning rate, -Muon's, and Adam's two corrections.
        device = next(iter(self.parameters.values())).device
        self.scalars = torch.zeros(4, device=device)

    def _muon_names(self) -> set[str]:
        if self.config.name != "muon":
            return set()
        matrices = (name for name, p in self.parameters.items() if p.dim() == 2)
        return {name for name in matrices if not name.endswith(_NOT_MATRICES)}

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, factor: float) -> Tensor:
        """One update at `factor` times the peak learning rate; returns the gradients' norm before clipping."""
        self.advance(factor)
        return self.apply()

    def advance(self, factor: float) -> None:
        """Counts an update and sends its scalars to the device: the part of a step that no graph can hold."""
        config = self.config
        self.num_updates += 1
        scalars = [-factor * config.learning_rate, -factor * config.muon_learning_rate, 1.0, 1.0]
        if config.bias_correction:
            scalars[2] = 1 / (1 - config.beta1**self.num_updates)
            scalars[3] = 1 / math.sqrt(1 - config.beta2**self.num_updates)
        host = torch.tensor(scalars, pin_memory=self.scalars.is_cuda)
        self.scalars.copy_(host, non_blocking=True)

    @torch.no_grad()
    def apply(self) -> Tensor:
        """The update that `advance` announced, on the device alone: no value is read from the host."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} has no gradient")
        gradients = {name: _gradient(p) for name, p in self.parameters.items()}
        norm = global_norm(gradients.values())
        if self.config.clip_norm:
            # clip / max(norm, clip), as tf.clip_by_global_norm: exactly 1 below the bound.
            torch._foreach_mul_(list(gradients.values()), self.config.clip_norm / norm.clamp(min=self.config.clip_norm))
        if self.moments:
            self._step_adam(gradients)
        if self.matrices:
            self._step_muon(gradients)
        return norm

    def _step_adam(self, gradients: Mapping[str, Tensor]) -> None:
        config = self.config
        rate, _, first_scale, second_scale = self.scalars.unbind()
        parameters: list[Tensor] = [self.parameters[name] for name in self.moments]
        first, second = [self.first[n] for n in self.moments], [self.second[n] for n in self.moments]
        grads = [gradients[name] for name in self.moments]
        torch._foreach_lerp_(first, grads, 1 - config.beta1)
        torch._foreach_mul_(second, config.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - config.beta2)

        denominators = torch._foreach_sqrt(second)
        if config.bias_correction:
            torch._foreach_mul_(denominators, second_scale)
        torch._foreach_add_(denominators, config.epsilon)
        updates = torch._foreach_div(first, denominators)
        if config.bias_correction:
            torch._foreach_mul_(updates, first_scale)
        # Norms and biases are not decayed, nor adapted by LAMB; embeddings are both.
        decayed = [i for i, parameter in enumerate(parameters) if parameter.dim() > 1]
        if decayed:
            weights = [parameters[i] for i in decayed]
            torch._foreach_add_([updates[i] for i in decayed], weights, alpha=config.weight_decay)
        if config.name == "lamb":
            for i in decayed:
                blocks_KX = updates[i].view(_num_blocks(self.moments[i]), -1)
                blocks_KX.mul_(_trust_ratios(parameters[i].view(blocks_KX.shape), blocks_KX))
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(parameters, updates)

    def _step_muon(self, gradients: Mapping[str, Tensor]) -> None:
        momentum, rate = self.config.muon_momentum, self.scalars[1]
        # As published; where there are no tensor cores bf16 gains nothing.
        dtype = torch.bfloat16 if rate.is_cuda else torch.float32
        for stack in self._stacks():
            parameters: list[Tensor] = [self.parameters[name] for name in stack]
            first, grads = [self.first[name] for name in stack], [gradients[name] for name in stack]
            torch._foreach_lerp_(first, grads, 1 - momentum)
            nesterov = torch._foreach_lerp(grads, first, momentum)
            num_blocks = [_num_blocks(name) for name in stack]
            blocks = [x.view(k, -1, x.shape[1]) for k, x in zip(num_blocks, nesterov, strict=True)]
            orthogonal = orthogonalise(torch.cat(blocks), dtype)
            # Keeps the size of an update independent of the matrix' shape (Jordan et al.).
            aspect = math.sqrt(max(1.0, orthogonal.shape[1] / orthogonal.shape[2]))
            split = torch.split(orthogonal * (rate * aspect), num_blocks)
            updates = [x.reshape(p.shape) for x, p in zip(split, parameters, strict=True)]
            torch._foreach_mul_(parameters, 1 + rate * self.config.weight_decay)
            torch._foreach_add_(parameters, updates)

    def _stacks(self) -> list[list[str]]:
        """Matrices whose blocks have the same shape, orthogonalised in one batch."""
        stacks: dict[tuple[int, int], list[str]] = {}
        for name, parameter in self.parameters.items():
            if name in self.matrices:
                shape = (parameter.shape[0] // _num_blocks(name), parameter.shape[1])
                stacks.setdefault(shape, []).append(name)
        return list(stacks.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Moments by name, and the number of updates; what `load_state_dict` takes back."""
        state = {f"first.{name}": moment for name, moment in self.first.items()}
        state |= {f"second.{name}": moment for name, moment in self.second.items()}
        return state | {"num_updates": torch.tensor(self.num_updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back a state; raises ValueError when it belongs to other parameters or another rule."""
        own = self.state_dict()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())[0]
            raise ValueError(f"optimizer state of another model or rule: {odd} is on one side only")
        for name, tensor in own.items():
            if name != "num_updates":
                tensor.copy_(state[name])
        self.num_updates = int(state["num_updates"])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _num_blocks(name: str) -> int:
    """Matrices of the published layout in one parameter: query, key and value are fused, and so are GeGLU's halves."""
    return {"qkv": 3, "geglu_in": 2}.get(name.split(".")[-2], 1)


def _trust_ratios(blocks_KX: Tensor, updates_KX: Tensor) -> Tensor:
    """LAMB's |parameter| / |update| per block, 1 where either is 0; [K, X] → [K, 1]."""
    sizes, lengths = blocks_KX.norm(dim=1, keepdim=True), updates_KX.norm(dim=1, keepdim=True)
    return torch.where((sizes > 0) & (lengths > 0), sizes / lengths, torch.ones_like(sizes))
