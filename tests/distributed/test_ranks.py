"""Runs with several ranks, with gloo on this machine: the same training as one rank, with faults, stops and resumes."""

import json
import os
import re
import signal
import subprocess
import sys

import faults
import pytest
import torch
from ranks import TIMEOUT, wait_for
from tiny_run import EXACT, STEPS, command, lines, truncate, weights

import electra_fast
from electra_fast.config.config import TrainConfig
from electra_fast.distributed.division import Division, rows_per_micro_batch
from electra_fast.files import checkpoint_folder
from electra_fast.model.matmul import DEFAULT, ONEDNN, has_onednn
from electra_fast.training.diagnostics import diverged_ranks

NO_DROPOUT = {"model.dropout": "0", "model.attention_dropout": "0"}


def assert_close_runs(run, other):
    """Asserts that metrics and weights are close."""
    ours = lines(run)
    theirs = lines(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, expected in zip(ours, theirs, strict=True):
        for name in ("loss", "generator_loss", "discriminator_loss", "grad_norm"):
            assert line[name] == (expected[name] and pytest.approx(expected[name], rel=1e-5)), name
        assert (line["tokens"], line["replaced_fraction"]) == (expected["tokens"], expected["replaced_fraction"])
    actual = weights(run)
    for name, expected in weights(other).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-3, atol=1e-4, msg=name)


def assert_equal_bits(run, other):
    """Asserts that metrics and weights are equal; evaluations only nearly, since the order of their sums differs."""
    assert lines(run) == lines(other)
    for line, expected in zip(*(lines(folder, "evaluations.jsonl") for folder in (run, other)), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    ours = weights(run)
    theirs = weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulate"), [(1, 10, 2), (2, 12, 3), (3, 10, 2), (4, 3, 1), (7, 12, 3)]
)
def test_each_row_in_one_micro_batch(world_size, batch_size, accumulate):
    train = TrainConfig(batch_size=batch_size, accumulate=accumulate)
    rows = []
    sizes = []
    for rank in range(world_size):
        division = Division.of(train, rank, world_size)
        local_rows = [row for group in division.groups for part in group for row in part]
        assert local_rows == list(division.rows)
        assert all(len(group) <= accumulate and all(group) for group in division.groups)
        rows += local_rows
        sizes += [len(part) for group in division.groups for part in group]
    assert rows == list(range(batch_size)) and max(sizes) == rows_per_micro_batch(train, world_size)


# Rows that the ranks and micro-batches divide unevenly; fewer rows than ranks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "batch_size", "accumulate", "world_size"),
    [("modern", "7", "1", 2), ("paper", "8", "2", 2), ("google", "3", "1", 4), ("deberta", "6", "2", 2)],
)
def test_result_independent_of_number_of_ranks(
    server, validation_corpus, tmp_path, recipe, batch_size, accumulate, world_size
):
    changes = NO_DROPOUT | {"train.batch_size": batch_size, "train.accumulate": accumulate, "train.steps": "8"}
    changes["optimizer.name"] = {"modern": "muon", "paper": "lamb"}.get(recipe, "adamw")
    for size in (1, world_size):
        server.run(size, validation_corpus, tmp_path / str(size), recipe=recipe, **changes)
    assert_close_runs(tmp_path / str(world_size), tmp_path / "1")


def test_exact_is_bitwise_equal_with_dropout(server, exact_run, validation_corpus, tmp_path):
    server.run(4, validation_corpus, tmp_path / "run", **EXACT)
    assert_equal_bits(tmp_path / "run", exact_run)


@pytest.mark.slow
def test_exact_is_bitwise_equal_with_muon(server, validation_corpus, tmp_path, own_processor):
    changes = EXACT | {"optimizer.name": "muon", "train.batch_size": "10", "train.steps": "4"}
    changes["train.matmul"] = ONEDNN if has_onednn() else DEFAULT
    for world_size in (1, 2, 4):
        server.run(world_size, validation_corpus, tmp_path / str(world_size), **changes)
    assert_equal_bits(tmp_path / "2", tmp_path / "1")
    assert_equal_bits(tmp_path / "4", tmp_path / "1")


def test_killed_rank_ends_others_without_loss(server, exact_run, validation_corpus, tmp_path):
    ranks = server.start(2, validation_corpus, tmp_path / "run", {"ELECTRA_FAST_FAULT": "kill@11/0"}, **EXACT)
    outputs = server.wait(ranks, [-signal.SIGKILL, 2])
    assert "rank 1: lost another rank" in outputs[1] and "Traceback" not in outputs[1]
    outputs = server.run(2, validation_corpus, tmp_path / "run", **EXACT)
    assert "resumes at step" in outputs[0]
    assert_equal_bits(tmp_path / "run", exact_run)


@pytest.mark.slow
def test_resume_with_other_number_of_ranks(server, exact_run, validation_corpus, tmp_path):
    changes = EXACT | {"train.keep_checkpoints": "9"}
    server.run(2, validation_corpus, tmp_path / "run", **changes)
    assert_equal_bits(tmp_path / "run", exact_run)
    for world_size, step in ((1, 15), (4, 6)):
        truncate(tmp_path / "run", step)
        server.run(world_size, validation_corpus, tmp_path / "run", **changes)
        assert_equal_bits(tmp_path / "run", exact_run)


@pytest.mark.slow
def test_lanes_independent_of_number_of_ranks(server, tiny_text, tiny_vocab, tmp_path):
    copies = (f"{number} {text}" for number in range(20) for text in tiny_text)  # five blocks
    electra_fast.prepare(copies, vocab=tiny_vocab, out=tmp_path / "shards", progress=False)
    changes = EXACT | {"train.keep_checkpoints": "9", "train.steps": "9"}
    server.run(1, tmp_path / "shards", tmp_path / "one", **changes, **{"data.lanes": "4"})
    server.run(4, tmp_path / "shards", tmp_path / "run", **changes, **{"data.lanes": "4"})
    assert_equal_bits(tmp_path / "run", tmp_path / "one")
    truncate(tmp_path / "run", 3)
    server.run(2, tmp_path / "shards", tmp_path / "run", **changes)  # the run's lanes
    assert_equal_bits(tmp_path / "run", tmp_path / "one")
    ranks = server.start(1, tmp_path / "shards", tmp_path / "run", **changes, **{"data.lanes": "2"})
    outputs = server.wait(ranks, 2)
    assert "data.lanes = 2, but this run was started with 4" in outputs[0]


@pytest.mark.slow
def test_signal_to_one_rank_stops_all_at_same_step(server, exact_run, validation_corpus, tmp_path):
    out = tmp_path / "run"
    ranks = server.start(2, validation_corpus, out, {"ELECTRA_FAST_FAULT": "sleep:0.05@0/0"}, **EXACT)
    wait_for(lambda: out.exists() and checkpoint_folder.steps(out))
    ranks[1].kill(signal.SIGUSR2)
    outputs = server.wait(ranks, 128 + signal.SIGUSR2)
    assert "checkpoint written; run again to resume" in outputs[0] and "Traceback" not in outputs[0] + outputs[1]
    assert outputs[1] == "stopping after this step; repeat to stop at once\n"
    assert 0 < checkpoint_folder.steps(out)[-1] < STEPS
    server.run(2, validation_corpus, out, **EXACT)
    assert_equal_bits(out, exact_run)


@pytest.mark.slow
def test_time_limit_stops_all_ranks(server, exact_run, validation_corpus, tmp_path):
    out = tmp_path / "run"
    slow = {"ELECTRA_FAST_FAULT": "sleep:1@2/1"}
    ranks = server.start(2, validation_corpus, out, slow, **EXACT, **{"train.max_minutes": "0.15"})
    outputs = server.wait(ranks, 75)
    assert "reached train.max_minutes = 0.15: checkpoint written at step" in outputs[0]
    assert 2 < checkpoint_folder.steps(out)[-1] < STEPS
    server.run(2, validation_corpus, out, **EXACT)
    assert_equal_bits(out, exact_run)


EXPLODES = {"optimizer.learning_rate": "5", "train.checkpoint_every": "1", "train.eval_every": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "fault", "changes", "words"),
    [
        (2, "nan@5/1", NO_DROPOUT, "grad_norm became nan or infinite in steps 5-6; step-3 is the last good checkpoint"),
        (2, "", EXPLODES, "the loss rose to .* is the best checkpoint .training loss"),
        (3, "flip@5/2", {}, "step 6: rank 2's parameters differ from the parameters of .*; step-3 is the last good"),
    ],
)
def test_all_ranks_end_diverged_run(server, validation_corpus, tmp_path, world_size, fault, changes, words):
    faults = {"ELECTRA_FAST_FAULT": fault} if fault else {}
    outputs = server.wait(server.start(world_size, validation_corpus, tmp_path / "run", faults, **changes), 2)
    assert re.search(words, outputs[0]) and set(outputs[1:]) == {""}
    assert checkpoint_folder.steps(tmp_path / "run")[-1] <= 3


@pytest.mark.slow
def test_overflow_on_one_rank_skipped_by_all(server, validation_corpus, tmp_path):
    """The step counts as skipped, and its tokens do not count."""
    # LAMB, since AdamW's kernel ignores a skipped step even if its gradients are nan.
    changes = NO_DROPOUT | {"train.precision": "fp16", "optimizer.name": "lamb"}
    server.run(2, validation_corpus, tmp_path / "nan", {"ELECTRA_FAST_FAULT": "nan@21/1"}, **changes)
    server.run(2, validation_corpus, tmp_path / "whole", **changes)
    faulty = lines(tmp_path / "nan")
    whole = lines(tmp_path / "whole")
    skipped = [line["skipped_steps"] - other["skipped_steps"] for line, other in zip(faulty, whole, strict=True)]
    assert skipped == [0, 0, 0, 0, 0, 1] and faulty[-1]["tokens"] < whole[-1]["tokens"]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "nan").values())


def test_majority_vote_names_divergent_rank():
    assert diverged_ranks([7, 7]) == ""
    assert diverged_ranks([7, 8, 7]) == "rank 1's parameters differ from the parameters of the other ranks"
    assert diverged_ranks([7, 8, 7, 7, 9]).startswith("ranks 1, 4's parameters differ")
    for tie in ([7, 8], [7, 7, 8, 8], [7, 7, 8, 9]):
        assert diverged_ranks(tie).endswith("have different parameters, and no majority agrees")


def test_hung_rank_ends_all_with_stacks(server, validation_corpus, tmp_path):
    fault = {"ELECTRA_FAST_FAULT": "hang@5/1"}
    ranks = server.start(2, validation_corpus, tmp_path / "run", fault, **{"train.timeout_seconds": "3"})
    outputs = server.wait(ranks, 2)
    stacks = [(tmp_path / f"run/stacks/rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert "rank 0: waited more than 3 s for" in outputs[0] and "rank-0.txt" in outputs[0]
    assert "rank 1: another rank waited too long for this one" in outputs[1]
    assert "in all_gather" in stacks[0] and "in inject" in stacks[1]


@pytest.mark.slow
def test_slowest_rank_in_every_line(server, validation_corpus, tmp_path):
    outputs = server.run(2, validation_corpus, tmp_path / "run", {"ELECTRA_FAST_FAULT": "sleep:0.1@4/1"})
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["slowest_rank"] for record in records[1:]] == [1] * 5
    assert all(0.1 < record["slowest_rank_seconds"] < 1 for record in records[1:])
    assert "slowest rank 1: 0." in outputs[0]


@pytest.mark.slow
def test_frozen_rank_zero_times_out(server, validation_corpus, tmp_path):
    """The TCP store of the first rank is frozen, too."""
    out = tmp_path / "run"
    changes = {"train.timeout_seconds": "3", "train.steps": "100000"}
    ranks = server.start(2, validation_corpus, out, **changes)
    wait_for(lambda: checkpoint_folder.steps(out) if out.exists() else False)
    ranks[0].kill(signal.SIGSTOP)
    assert ranks[1].wait(timeout=30) == 2 and "waited more than 3 s" in ranks[1].output()
    ranks[0].kill()
    ranks[0].wait()


@pytest.mark.slow
def test_slow_checkpoint_does_not_time_out(server, validation_corpus, tmp_path):
    """Each write takes longer than the ranks may wait for each other."""
    slow = {"ELECTRA_FAST_TEST_SLOW_WRITE": "4"}
    changes = {"train.timeout_seconds": "2", "train.steps": "4", "train.checkpoint_every": "2"}
    server.run(2, validation_corpus, tmp_path / "run", slow, **changes)
    assert checkpoint_folder.steps(tmp_path / "run") == [2, 4]


@pytest.mark.slow
def test_error_reported_once(server, validation_corpus, tiny_corpus, tmp_path):
    ranks = server.start(2, tmp_path / "nowhere", tmp_path / "run")
    outputs = server.wait(ranks, 2)
    assert outputs[0].count("\n") == 1 and "nowhere" in outputs[0] and outputs[1] == ""
    outputs = server.wait(server.start(3, validation_corpus, tmp_path / "none", **EXACT), 2)
    assert "needs 1, 2 or 4 ranks, got 3" in outputs[0] and outputs[1:] == ["", ""] and not (tmp_path / "none").exists()
    for rank, corpus in enumerate((validation_corpus, tiny_corpus)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "shards").symlink_to(corpus)
    outputs = server.wait(server.start(2, "shards", tmp_path / "run", folders=[tmp_path / "0", tmp_path / "1"]), 2)
    assert "not the same corpus on rank 1 as on the first" in outputs[1] and outputs[0] == ""
    server.run(2, validation_corpus, tmp_path / "run", **{"train.steps": "4"})
    ranks = server.start(2, validation_corpus, tmp_path / "run", **{"train.seed": "1", "train.steps": "4"})
    outputs = server.wait(ranks, 2)
    assert "train.seed = 1, but this run was started with 0" in outputs[0] and outputs[1] == ""


@pytest.mark.slow
def test_restarted_ranks_resume_and_end_with_torchrun(validation_corpus, tmp_path):
    out = tmp_path / "run"
    changes = {"train.steps": "5000", "train.eval_every": "0"}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [*start, faults.__file__, *command(validation_corpus, out, **changes)[3:]],
        env=os.environ | {"ELECTRA_FAST_FAULT": "kill@10/1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: out.exists() and [step for step in checkpoint_folder.steps(out) if step > 10])
    process.kill()
    _, stderr = process.communicate(timeout=TIMEOUT)  # until the ranks end, which share its standard error
    assert "resumes at step 9 of 5000" in stderr and stderr.count("lost another rank") <= 1
    assert process.returncode == -signal.SIGKILL and stderr.count("checkpoint written; run again to resume") == 1
