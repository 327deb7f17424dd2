"""The generator head's kernels compiled ahead of time for other GPUs, as their launchers would compile them."""

from ahead_of_time import MAX_SHARED_BYTES, compile_kernel

from electra_fast.kernels import generator_head_chunked as chunked
from electra_fast.kernels import generator_head_narrow as narrow

# Few rows and many, for every block size that `lse_sample_blocks` chooses.
NUM_ROWS = (512, 20_000)


def compile_lse_sample(dtype, width, num_rows, capability, sample=True, adjusted=False, with_mean=True):
    blocks = narrow.lse_sample_blocks(num_rows, width)
    types = {"x_ptr": f"*{dtype}!", "weight_ptr": f"*{dtype}!", "bias_ptr": "*fp32!", "target_ptr": "*i64!"}
    types |= {"gumbel_ptr": "*fp32!", "statistics_ptr": "*fp32!", "tiles_ptr": "*i32!", "mean_ptr": "*fp32!"}
    types |= dict.fromkeys(("num_rows", "num_tiles", "tiles_per_split"), "i32")
    types |= {"inverse_temperature": "fp32", "penalty": "fp32"}
    constants = {"WIDTH": width, "BLOCK_E": width, "BLOCK_M": blocks.rows, "TILE": 128, "SAMPLE": sample}
    constants |= {"HAS_LOGIT_ADJUSTMENT": adjusted, "WITH_MEAN": with_mean, "STAGES": blocks.num_stages}
    constants |= {"PRECISION": "tf32"}
    return compile_kernel(
        "generator_head_narrow", "_lse_sample_kernel", types, constants,
        capability=capability, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def compile_table_gradient(dtype, width, capability):
    blocks = narrow.gradient_blocks(width)
    types = {"x_ptr": f"*{dtype}!", "weight_ptr": f"*{dtype}!", "bias_ptr": "*fp32!", "rows_ptr": "*fp32!"}
    types |= {"target_ptr": "*i32!", "table_grad_ptr": "*fp32!", "bias_grad_ptr": "*fp32!"}
    types |= {"num_rows": "i32", "num_padded": "i32!", "vocab_size": "i32"}
    constants = {"WIDTH": width, "BLOCK_E": width, "BLOCK_M": blocks.rows, "BLOCK_V": blocks.entries}
    constants |= {"STAGES": blocks.num_stages, "PRECISION": "tf32"}
    return compile_kernel(
        "generator_head_narrow", "_table_gradient_kernel", types, constants,
        capability=capability, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def compile_combine(width, capability):
    types = dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16!") | dict.fromkeys(("bias_ptr", "uniform_ptr"), "*fp32!")
    types |= dict.fromkeys(("statistics_ptr", "mean_ptr", "nll_ptr", "lse_ptr", "dnll_dx_ptr"), "*fp32!")
    types |= {"target_ptr": "*i64!", "sample_ptr": "*i64!", "tiles_ptr": "*i32!", "correct_ptr": "*i1!"}
    types |= {"num_rows": "i32", "num_splits": "i32", "inverse_temperature": "fp32", "penalty": "fp32"}
    constants = {"WIDTH": width, "BLOCK_E": width, "BLOCK_S": 16, "TILE": 128, "SAMPLE": True}
    constants |= {"HAS_LOGIT_ADJUSTMENT": True, "WITH_MEAN": True}
    return compile_kernel("generator_head_narrow", "_combine_kernel", types, constants, capability=capability)


def compile_small(name, capability):
    """The kernels without a dot, by name."""
    fp32, i64, i32 = "*fp32!", "*i64!", "i32"
    known = {
        "_gumbel_kernel": ("generator_head_narrow", {
            "slot_ptr": i64, "seed_and_step_ptr": i64, "gumbel_ptr": fp32, "num_rows": i32, "num_tiles": i32,
        }, {"BLOCK_M": 128}),
        "_row_gradient_kernel": ("generator_head_narrow", {
            "grad_ptr": fp32, "target_ptr": i64, "lse_ptr": fp32, "dnll_dx_ptr": fp32, "x_grad_ptr": "*bf16!",
            "rows_ptr": fp32, "padded_target_ptr": "*i32!", "num_rows": i32, "num_padded": i32,
        }, {"WIDTH": 256, "BLOCK_E": 256, "BLOCK_M": 16}),
        "_pad_table_kernel": ("generator_head", {
            "table_ptr": fp32, "bias_ptr": fp32, "weight_ptr": "*bf16!", "padded_bias_ptr": fp32, "vocab_size": i32,
        }, {"WIDTH": 768, "PADDED_WIDTH": 768, "BLOCK_E": 1024, "BLOCK_V": 4}),
        "_read_kernel": ("generator_head_chunked", {
            "logits_ptr": "*bf16!", "target_ptr": i64, "slot_ptr": i64, "seed_and_step_ptr": i64, "nll_ptr": fp32,
            "lse_ptr": fp32, "sample_ptr": i64, "correct_ptr": "*i1", "num_tiles": i32, "inverse_temperature": "fp32",
            "penalty": "fp32",
        }, {"TILE": 128, "TILES": chunked.TILES_PER_STEP, "SAMPLE": True, "HAS_LOGIT_ADJUSTMENT": True}),
        "_logits_gradient_kernel": ("generator_head_chunked", {
            "logits_ptr": "*bf16!", "logits_grad_ptr": "*bf16!", "grad_ptr": fp32, "target_ptr": i64,
            "lse_ptr": fp32, "bias_grad_ptr": fp32, "num_rows": i32, "num_columns": "i32!",
        }, {"ROWS": chunked.GRADIENT_ROWS, "STEP": chunked.GRADIENT_STEP, "COLUMNS": chunked.GRADIENT_COLUMNS}),
    }  # fmt: skip
    module, types, constants = known[name]
    return compile_kernel(module, name, types, constants, capability=capability)


def compile_all(jobs):
    """The machine code of each (function, arguments)."""
    return {job: job[0](*job[1:]) for job in jobs}


def test_products_run_on_hopper_tensor_cores_without_spills():
    samplers = [(compile_lse_sample, "bf16", width, num_rows, 90) for width in (64, 128) for num_rows in NUM_ROWS]
    samplers += [(compile_lse_sample, "bf16", 256, NUM_ROWS[1], 90), (compile_lse_sample, "fp16", 128, NUM_ROWS[1], 90)]
    samplers += [(compile_lse_sample, "bf16", 128, NUM_ROWS[1], 90, True, True)]  # a temperature
    for with_mean in (True, False):
        samplers.append((compile_lse_sample, "bf16", 128, NUM_ROWS[1], 90, False, False, with_mean))
    gradients = [(compile_table_gradient, "bf16", width, 90) for width in (64, 128, 256)]
    gradients += [(compile_table_gradient, "fp16", 128, 90)]
    # At a temperature, from the widest table: two maxima, two sums and the largest accumulator.
    rare = (compile_lse_sample, "bf16", 256, NUM_ROWS[1], 90, True, True)
    for job, code in compile_all([*samplers, *gradients, rare]).items():
        assert code.spilled_bytes <= (256 if job == rare else 0), (job, code)
        assert code.shared_bytes <= MAX_SHARED_BYTES[90], (job, code)
        assert code.tensor_core_instructions > 0, (job, code)


def test_products_fit_other_gpus():
    """Up to E = 128, within the 99 KB of shared memory of smaller GPUs; about 14 of 255 registers may spill."""
    jobs = [(compile_lse_sample, "bf16", 128, num_rows, 80) for num_rows in NUM_ROWS]
    jobs += [(compile_table_gradient, "bf16", 128, 80), (compile_lse_sample, "bf16", 64, NUM_ROWS[1], 80)]
    for job, code in compile_all(jobs).items():
        assert code.spilled_bytes <= 64, (job, code)
        assert code.shared_bytes <= 99 * 1024, (job, code)
        assert code.tensor_core_instructions > 0, (job, code)


def test_the_other_kernels_fit():
    names = ["_gumbel_kernel", "_row_gradient_kernel", "_pad_table_kernel", "_read_kernel", "_logits_gradient_kernel"]
    jobs = [(compile_small, name, 90) for name in names]
    jobs += [(compile_small, "_read_kernel", 80), (compile_combine, 256, 90), (compile_combine, 128, 80)]
    for job, code in compile_all(jobs).items():
        assert code.spilled_bytes == 0, (job, code)
        assert code.shared_bytes <= 48 * 1024, (job, code)
