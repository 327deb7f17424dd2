"""fp32 products on a CPU with torch's default or with oneDNN: exact enough, restored, and chosen if faster."""

import threading

import pytest
import torch

from electra_fast.config.config import AUTO, Config
from electra_fast.errors import InputError
from electra_fast.model.matmul import (
    DEFAULT,
    KINDS,
    MAX_DIFFERENCE,
    MIN_SPEEDUP,
    ONEDNN,
    MatmulMeasurement,
    choose_matmul,
    has_onednn,
    measure_matmul,
    use_matmul,
)

CPU = torch.device("cpu")
SWITCH = torch.backends.mkldnn.matmul
# (tokens, inputs, outputs)
SIZES = [(37, 128, 192), (100, 2048, 64)]


@pytest.fixture
def onednn(own_processor):
    """Skips tests that compute with oneDNN if it is not available."""
    if not has_onednn():
        pytest.skip("needs a processor with AVX-512 and without AMX")


@pytest.fixture
def processor(monkeypatch):
    """Returns a function that sets the processor's capabilities."""
    return lambda *names: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))


def products(x, weight, dy):
    """Returns a linear layer's products: forward, input gradient, weight gradient, forward with a bias, and batched."""
    batched = torch.bmm(x.expand(3, -1, -1), weight.T.expand(3, -1, -1))
    return x @ weight.T, dy @ weight, dy.T @ x, torch.addmm(weight[:, 0], x, weight.T), batched


def relative(actual, exact):
    return float((actual.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_products_are_fp32_and_repeat_bitwise(onednn, tokens, inputs, outputs):
    torch.manual_seed(0)
    factors = [torch.randn(size) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))]
    exact = products(*(factor.double() for factor in factors))
    with use_matmul(ONEDNN):
        actual = products(*factors)
        repeated = products(*factors)
    for ours, theirs, expected in zip(actual, repeated, exact, strict=True):
        assert relative(ours, expected) < MAX_DIFFERENCE and torch.equal(ours, theirs)


@pytest.fixture(params=["none", "ieee"])
def before(request):
    """The initial setting of the switch."""
    original = SWITCH.fp32_precision
    SWITCH.fp32_precision = request.param
    yield request.param
    SWITCH.fp32_precision = original


def test_previous_setting_is_restored(processor, before):
    processor("avx512_bw")
    with use_matmul(DEFAULT):
        assert SWITCH.fp32_precision == before
    with pytest.raises(ZeroDivisionError), use_matmul(ONEDNN):
        with use_matmul(ONEDNN):
            assert SWITCH.fp32_precision == "bf16"
        assert SWITCH.fp32_precision == "bf16"
        1 / 0  # noqa: B018
    assert SWITCH.fp32_precision == before


def test_contexts_of_threads_may_overlap(processor, before):
    processor("avx512_bw")
    entered = threading.Barrier(3)
    leave = [threading.Event(), threading.Event()]

    def use(number):
        with use_matmul(ONEDNN):
            entered.wait(10)
            leave[number].wait(10)

    threads = [threading.Thread(target=use, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    for number, expected in enumerate(("bf16", before)):
        leave[number].set()
        threads[number].join()
        assert SWITCH.fp32_precision == expected


@pytest.mark.parametrize("capabilities", [(), ("avx2", "avx512_f"), ("avx512_bw", "avx512_bf16", "amx_tile")])
def test_onednn_requires_avx512_without_amx(processor, capabilities):
    processor(*capabilities)
    assert choose_matmul(AUTO, CPU) == choose_matmul(DEFAULT, CPU) == DEFAULT
    refused = 'matmul = "onednn": requires AVX-512 without AMX, .*set "default"'
    with pytest.raises(InputError, match=refused):
        choose_matmul(ONEDNN, CPU)
    with pytest.raises(InputError, match=refused), use_matmul(ONEDNN):
        pytest.fail("products of another library")


def test_onednn_requires_a_cpu(processor):
    processor("avx512_bw")
    assert [choose_matmul(name, CPU) for name in (AUTO, DEFAULT, ONEDNN)] == [AUTO, DEFAULT, ONEDNN]
    cuda = torch.device("cuda")
    assert choose_matmul(AUTO, cuda) == choose_matmul(DEFAULT, cuda) == DEFAULT
    with pytest.raises(InputError, match='matmul = "onednn": requires a CPU, not cuda; set "auto"'):
        choose_matmul(ONEDNN, cuda)


def measured(default, onednn, difference=1e-7):
    """Returns a measurement with these seconds for all products together."""
    return MatmulMeasurement(
        {DEFAULT: dict.fromkeys(KINDS, default / 3), ONEDNN: dict.fromkeys(KINDS, onednn / 3)}, difference
    )


def test_clearly_faster_library_is_chosen():
    assert measured(2.0, 1.0).fastest == measured(1.01 * MIN_SPEEDUP, 1.0).fastest == ONEDNN
    assert measured(0.99 * MIN_SPEEDUP, 1.0).fastest == measured(1.0, 2.0).fastest == DEFAULT
    mixed = {DEFAULT: (1.0, 1.0, 1.0), ONEDNN: (0.2, 1.2, 1.2)}  # all kinds together count
    seconds = {name: dict(zip(KINDS, times, strict=True)) for name, times in mixed.items()}
    assert MatmulMeasurement(seconds, 0.0).fastest == DEFAULT
    ratios = "forward 2.00, input gradient 2.00, weight gradient 2.00"
    assert str(measured(2.0, 1.0)) == f"time of fp32 products with torch's default, relative to oneDNN: {ratios}"


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_rounded_factors_are_never_chosen(tokens, inputs, outputs):
    torch.manual_seed(0)
    factors = [torch.randn(size) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))]
    rounded = products(*(factor.bfloat16().float() for factor in factors))
    for ours, expected in zip(rounded, products(*factors), strict=True):
        measurement = measured(10.0, 1.0, relative(ours, expected.double()))
        assert measurement.fastest == DEFAULT and "differ by " in str(measurement)


def test_measurement_has_all_products(onednn):
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    for recipe in ("google", "modern"):
        measurement = measure_matmul(Config.preset("tiny", recipe).model, 128)
        assert 0 < measurement.difference < MAX_DIFFERENCE or measurement.fastest == DEFAULT
        assert all(measurement.seconds[name][kind] > 0 for name in (DEFAULT, ONEDNN) for kind in KINDS)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert SWITCH.fp32_precision != "bf16"
