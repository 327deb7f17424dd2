"""Full sharding (`train.sharding = "full"`): each process holds some rows of every parameter, gradient and moment.

Torch's FSDP2 gathers the parameters of a layer before it computes and drops them afterwards, and reduces gradients into
the rows that each process holds. Since it uses hooks on modules, an objective's forward pass must be a module's:
`ObjectiveModule`. `optimizers.shards` has the rows of this process as ordinary tensors.

All processes must make the same calls in the same order, even without rows of data (`data.loader.padding_row`). FSDP's
hooks cannot be captured in a CUDA graph. Importing FSDP takes seconds, so this module is imported only when needed.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from electra_fast.model.layers import BertLayer, ModernLayer
from electra_fast.model.model import Electra, Encoder
from electra_fast.objectives.objective import Forward, MicroBatch, Output, Predictions


class ObjectiveModule(nn.Module):
    """Runs an objective's forward pass as a module's, so that FSDP gathers and drops parameters around it.

    `Electra` cannot be the root, since objectives call its parts and read its parameters but never call it.
    """

    def __init__(self, model: Electra) -> None:
        super().__init__()
        self.model = model

    def forward(self, forward: Forward, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Predictions | None]:
        """Returns the fields of `Output` as a tuple, so that torch 2.11 finds the loss, whose gradient FSDP hooks."""
        output = forward(self.model, batch)
        return output.loss, output.totals, output.predictions

    def run(self, forward: Forward) -> Forward:
        """Wraps `forward` for a micro-batch of this process, with the denominators of all processes.

        With gradients enabled, the loss's backward pass must precede the next call: it drops the parameters outside of
        layers. Without gradients, they are dropped here. While they are gathered, neither writes to the shards nor
        `requires_grad_` take effect.
        """

        def run_as_module(model: Electra, batch: MicroBatch) -> Output:
            output = Output(*self(forward, batch))
            if not torch.is_grad_enabled():
                cast(FSDPModule, self).reshard()
            return output

        return run_as_module


def shard_model(model: Electra, mesh: DeviceMesh) -> ObjectiveModule:
    """Replaces a model's parameters by this process's rows, in place, and returns the module that runs it.

    Each layer is gathered as a whole and dropped after its forward pass; everything else (embeddings, heads, norms,
    projections) is gathered once for both passes. Gradients are summed over the processes, not averaged.

    Args:
        model: A whole model, equal on all processes, on the mesh's device, where it must stay: `to` would leave the
            memory that `Shards` refers to. Or on `meta`: then call `to_empty` on the result before making `Shards`, and
            fill the parameters by `Shards.scatter`, and the buffers.
        mesh: All processes in one dimension: `init_device_mesh(device.type, (num_processes,))`.
    """
    root = ObjectiveModule(model)
    layers = [module for module in model.modules() if isinstance(module, BertLayer | ModernLayer)]  # shared layers once
    # In `modernbert`, a layer uses the next layer's norm. The norms of an encoder are gathered together.
    encoders = [module for module in model.modules() if isinstance(module, Encoder) and module.output_norm is not None]
    norms = [encoder.norms[:-1] for encoder in encoders if len(encoder.layers) > 1]
    for group in norms:
        fully_shard(group, mesh=mesh, reshard_after_forward=True)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in (root, *layers, *(group[0] for group in norms)):
        # Gloo can only sum, and losses are already divided by the whole step's denominators. Each module needs both
        # calls: the factor alone requests NCCL's PREMUL_SUM, the sum alone still divides by the number of processes.
        cast(FSDPModule, module).set_gradient_divide_factor(1.0)
        cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)
    return root
