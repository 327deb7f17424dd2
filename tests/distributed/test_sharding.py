"""A model whose parameters are divided among ranks trains, evaluates, saves and resumes like a whole model."""

import itertools
import json
import shutil
import signal

import pytest
import torch
from ranks import wait_for
from test_electra import LOCAL, make_batch, make_config, make_model
from test_ranks import NO_DROPOUT, assert_close_runs
from tiny_run import lines, truncate
from variants import DIFFERENT, VARIANTS

from electra_fast.data.loader import padding_row
from electra_fast.files import checkpoint_folder
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.optimizers.shards import local_rows

SHARDED = {"train.sharding": "full"}
APART = {"model.tying": "none"}
TOGETHER = {"model.tying": "all", "generator.fraction": "1.0"}
LOCAL_WINDOW = {"model.local_attention": "4", "model.global_attention_every": "2"}


# Some parameters have fewer rows than there are ranks, and fused matrices are cut at any row.
@pytest.mark.parametrize(
    ("recipe", "optimizer", "world_size", "changes"),
    [
        pytest.param("google", "lamb", 3, VARIANTS["all-tokens-mlm"] | APART, marks=pytest.mark.slow),
        ("modern", "muon", 3, TOGETHER | LOCAL_WINDOW),
        pytest.param("paper", "muon", 2, VARIANTS["two-stage"], marks=pytest.mark.slow),
        pytest.param("paper", "adamw", 2, VARIANTS["adversarial"], marks=pytest.mark.slow),
        pytest.param(
            "deberta", "muon", 2, {"model.conv_kernel_size": "3", "generator.num_layers": "2"}, marks=pytest.mark.slow
        ),
    ],
)
def test_sharded_model_matches_whole_model(server, validation_corpus, tmp_path, recipe, optimizer, world_size, changes):
    changes = NO_DROPOUT | {"optimizer.name": optimizer, "train.steps": "8", "train.batch_size": "10"} | changes
    server.run(1, validation_corpus, tmp_path / "whole", recipe=recipe, **changes)
    server.run(world_size, validation_corpus, tmp_path / "run", recipe=recipe, **changes, **SHARDED)
    assert_close_runs(tmp_path / "run", tmp_path / "whole")
    evaluations = [lines(tmp_path / name, "evaluations.jsonl") for name in ("run", "whole")]
    for actual, expected in zip(*evaluations, strict=True):
        losses = {name: value for name, value in expected.items() if name.endswith("loss") and value is not None}
        assert {name: actual[name] for name in losses} == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
def test_resume_between_sharded_and_whole(server, validation_corpus, tmp_path):
    """Both resumes also lengthen the texts."""
    changes = NO_DROPOUT | {"train.steps": "12", "train.batch_size": "10", "train.keep_checkpoints": "9"}
    server.run(1, validation_corpus, tmp_path / "whole", **changes)
    truncate(tmp_path / "whole", 6)
    record = {"step": 6, "changes": {"model.max_positions": [128, 200]}}
    (tmp_path / "whole" / "changes.jsonl").write_text(json.dumps(record) + "\n")
    changes["model.max_positions"] = "200"
    server.run(1, validation_corpus, tmp_path / "whole", **changes)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for world_size, step, sharding in ((3, 6, SHARDED), (1, 9, {})):
        truncate(tmp_path / "run", step)
        server.run(world_size, validation_corpus, tmp_path / "run", **changes, **sharding)
        assert_close_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_rank_killed_in_sharded_step_ends_other(server, validation_corpus, tmp_path):
    out = tmp_path / "run"
    ranks = server.start(2, validation_corpus, out, **SHARDED, **{"train.steps": "100000"})
    wait_for(lambda: checkpoint_folder.steps(out) if out.exists() else False)
    ranks[1].kill()
    assert ranks[0].wait() == 2 and "rank 0: lost another rank" in ranks[0].output()
    assert "Traceback" not in ranks[0].output() and ranks[1].wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", [*DIFFERENT, "local attention", "deberta"])
def test_padding_row_has_zero_loss_and_all_gradients(name):
    deberta = {"model.architecture": "deberta", "model.tying": "disentangled", "model.conv_kernel_size": "3"}
    config = make_config(**(DIFFERENT | {"local attention": LOCAL, "deberta": deberta})[name])
    model = make_model(config).train()
    objective = objective_of(config)
    batch = make_batch()
    empty = {name: tensor[:0] for name, tensor in batch.items() if name != "cu_seqlens"}
    row = padding_row(empty | {"cu_seqlens": None})
    assert all(value == 0 for value in objective.loss_denominators(row).values())
    compute = ComputeConfig("sdpa", torch.float32)
    key = RngKey(torch.tensor([1, 2]), 3)
    output = objective.forward(model, MicroBatch(row, compute, key, objective.loss_denominators(batch)))
    output.loss.backward()
    assert output.loss == 0 and all(value == 0 for value in output.totals.values())
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), parameter_name


def test_rows_divided_like_torch_chunk():
    for num_rows, num_processes in itertools.product((1, 2, 3, 8, 51), (1, 2, 3, 4, 8)):
        chunks = [chunk.tolist() for chunk in torch.arange(num_rows).chunk(num_processes)]
        rows = [list(range(num_rows))[local_rows(num_rows, rank, num_processes)] for rank in range(num_processes)]
        assert rows == chunks + [[]] * (num_processes - len(chunks))
