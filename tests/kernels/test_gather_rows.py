"""Rows by index equal indexing in both directions, and the compiler does not decompose them, so sums have one order."""

import pytest
import torch
from comparison import DEVICE
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import electra_fast as ef
from electra_fast.kernels.gather_rows import add_rows, gather_rows
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey


@pytest.mark.parametrize(
    ("num_rows", "width", "num_gathered", "dtype"), [(40, 64, 300, torch.bfloat16), (5000, 8, 4000, torch.float32)]
)
def test_equals_indexing(num_rows, width, num_gathered, dtype):
    random = torch.Generator().manual_seed(width)
    x = torch.randn(num_rows, width, generator=random).to(DEVICE, dtype).requires_grad_()
    index = torch.randint(0, num_rows, (num_gathered,), generator=random).to(DEVICE)
    index[: num_gathered // 2] = 0  # one index is frequent
    dy = torch.randn(num_gathered, width, generator=random).to(DEVICE, dtype)
    expected = torch.zeros(num_rows, width, dtype=torch.float64, device=DEVICE).index_add_(0, index, dy.double())
    for ids in (index, index.int()):
        gathered = gather_rows(x, ids)
        assert torch.equal(gathered, x[index])
        (gradient,) = torch.autograd.grad(gathered, x, dy)
        (repeated,) = torch.autograd.grad(gather_rows(x, ids), x, dy)
        assert torch.equal(gradient, repeated)
        magnitude = torch.zeros_like(expected).index_add_(0, index, dy.double().abs())
        assert ((gradient.double() - expected).abs() <= 8 * torch.finfo(dtype).eps * magnitude).all()


@pytest.mark.slow
def test_is_registered_for_autograd_and_compilation():
    x = torch.randn(7, 4, device=DEVICE, requires_grad=True)
    index = torch.tensor([3, 0, 3], device=DEVICE)
    torch.library.opcheck(gather_rows, (x, index))
    torch.library.opcheck(add_rows, (torch.randn(3, 4, device=DEVICE), index, 7))


def test_compiled_step_has_no_atomic_float_adds(tiny_corpus):
    """Inductor turns an accumulating index_put or scatter into atomic additions, so the traced step must have none."""
    torch.compiler.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    size = ef.Corpus(tiny_corpus).vocab_size
    config = ef.Config.preset("tiny", "google").override({"model.num_layers": 1}, vocab_size=size)
    batch = ef.to_torch(next(ef.BatchLoader(tiny_corpus, sequence_length=32, batch_size=4)))
    model = ef.Electra(config).train()
    rng_key = RngKey(torch.tensor([1, 2]))
    objective = objective_of(config)
    step = torch.compile(objective.forward, backend=backend, fullgraph=True)
    denominators = objective.loss_denominators(batch)
    output = step(model, MicroBatch(batch, ComputeConfig("sdpa", torch.float32), rng_key, denominators))
    output.loss.backward()
    assert len(graphs) == 2
    for node in (node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            name = str(node.target)
            adds = any(word in name for word in ("scatter_add", "scatter_reduce", "index_add"))
            adds |= "index_put" in name and True in node.args  # its argument `accumulate`
            assert not adds, f"{node.target} of {value.dtype}: {node.meta.get('stack_trace')}"
