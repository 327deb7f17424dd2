"""Full sharding (`train.sharding = "full"`): each process holds some rows of every parameter, gradient and moment.

Torch's FSDP2 gathers the parameters of a layer before it computes and drops them after, and adds up gradients over all
processes into the rows that each holds. It does so by hooks on modules, and therefore an objective's forward pass must
be a module's: `ObjectiveModule`. `optimizers.shards` has the rows of this process as ordinary tensors.

All processes must make the same calls in the same order, with rows of data or without
(`data.loader.padding_row`). FSDP's hooks cannot be captured in a CUDA graph. To import FSDP takes seconds, so only who
shards a model imports this module.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from electra_fast.model.model import BertLayer, Electra, ModernLayer
from electra_fast.objectives.objective import Forward, MicroBatch, Output, Predictions


class ObjectiveModule(nn.Module):
    """Runs an objective's forward pass of a model as its own, around which FSDP gathers and drops parameters.

    `Electra` alone cannot be the root, since objectives never call it: they call its parts and read its parameters.
    """

    def __init__(self, model: Electra) -> None:
        super().__init__()
        self.model = model

    def forward(self, forward: Forward, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Predictions | None]:
        """The fields of `Output`, in a tuple, where torch 2.11 too finds the loss, whose gradient FSDP hooks."""
        output = forward(self.model, batch)
        return output.loss, output.totals, output.predictions

    def run(self, forward: Forward) -> Forward:
        """`forward` of a micro-batch of this process, with the denominators of all processes.

        With gradients enabled, the loss' backward pass must follow before the next call: it drops the parameters that
        are not a layer's. Without, they are dropped here. While they are gathered, a pass does not see what is written
        to the shards, nor `requires_grad_` what it is called on.
        """

        def run_as_module(model: Electra, batch: MicroBatch) -> Output:
            output = Output(*self(forward, batch))
            if not torch.is_grad_enabled():
                cast(FSDPModule, self).reshard()
            return output

        return run_as_module


def shard_model(model: Electra, mesh: DeviceMesh) -> ObjectiveModule:
    """Replaces a model's parameters by this process' rows of them, in place, and returns what runs it.

    A layer is gathered in one piece and dropped after its forward pass; all else (embeddings, heads, norms,
    projections) is gathered once for both passes. Gradients are summed over the processes, not averaged.

    Args:
        model: Whole and equal on all processes, on the mesh's device, where it must stay: `to` would leave the memory
            that `Shards` refers to. Or on `meta`; then call `to_empty` on the result before `Shards` is made, and fill
            the parameters by `Shards.scatter`, and the buffers.
        mesh: One dimension, all processes: `init_device_mesh(device.type, (num_processes,))`.
    """
    root = ObjectiveModule(model)
    layers = [module for module in model.modules() if isinstance(module, BertLayer | ModernLayer)]  # shared ones once
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in (root, *layers):
        # Gloo has no other reduction than the sum, and losses are divided by the whole step's denominators already.
        # Both calls are needed, for each module: a factor alone asks for NCCL's PREMUL_SUM, the sum alone still
        # divides by the number of processes.
        cast(FSDPModule, module).set_gradient_divide_factor(1.0)
        cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)
    return root
