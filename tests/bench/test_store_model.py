"""The arithmetic of an epoch from an object store, against the engine's constants, its layout and a simulation."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import store_model as model

import electra_fast as ef

TREE = Path(__file__).resolve().parents[2]
SOURCES, PAGE = TREE / "crates/electra-data/src", TREE / "docs/scale.md"
KEPT, DEFAULT, LINES, LINES_DEFAULT = model.readings(model.Corpus())


def constant(path, name):
    """A constant of the data engine, from its source."""
    found = re.search(rf"const {name}: \w+ = ([\d_ *<]+);", (SOURCES / path).read_text(encoding="utf-8"))
    assert found, f"{path} has no {name}"
    factors = [1 << int(f.split("<<")[1]) if "<<" in f else int(f) for f in found[1].split("*")]
    return math.prod(factors)


def test_the_constants_are_those_of_the_data_engine():
    window, loader = "loader/shuffle_window.rs", "loader/batch_loader.rs"
    assert constant(window, "BLOCK_TOKENS") == model.BLOCK_TOKENS
    assert constant(window, "BLOCKS_PER_WINDOW") == model.WINDOW_BLOCKS
    assert constant(loader, "MIN_CACHED_WINDOWS") == model.MIN_WINDOWS
    assert constant(loader, "MAX_WAITING") == model.WINDOWS_AHEAD
    assert constant("format/corpus.rs", "MARGIN") == model.MARGIN
    assert constant("format/header.rs", "BLOCK_BYTES") == model.PAGE
    assert constant("store/client.rs", "CONCURRENT") == model.IN_FLIGHT
    assert constant("prepare/options.rs", "SHARD_TOKENS") == model.Corpus().shard_tokens
    assert ef.Config.preset("small").data.cache_bytes == model.DEFAULT_CACHE
    # What the page says besides.
    assert constant("format/corpus.rs", "CHECKED_SHARDS") == 1_000
    assert constant("format/corpus.rs", "MAX_MAPPED") == 16_384
    assert constant("store/client.rs", "RETRY_SECONDS") == 180


def pages_of_blocks(num_tokens):
    """How many pages each block of a shard needs, as `Blocks::locate`, `prefetch` and `blocks_of` compute them."""
    count = round(num_tokens / model.BLOCK_TOKENS)
    edges = [num_tokens * index // count for index in range(count + 1)]
    starts = [64 + 2 * max(0, edge - model.MARGIN) for edge in edges[:-1]]
    ends = [64 + 2 * min(num_tokens, edge + model.MARGIN) for edge in edges[1:]]
    return [-(-end // model.PAGE) - start // model.PAGE for start, end in zip(starts, ends, strict=True)]


def test_a_block_needs_nine_pages():
    shards = np.random.default_rng(0).integers(90_000_000, 2**27, 100)
    pages = np.mean([np.mean(pages_of_blocks(int(num_tokens))) for num_tokens in shards])
    assert model.Corpus().bodies[0] / model.PAGE == pytest.approx(pages, rel=0.01)
    assert np.mean(pages_of_blocks(2**27)) == pytest.approx(10, abs=0.02)


@pytest.fixture
def entry(tiny_corpus):
    return json.loads((tiny_corpus / "manifest.json").read_text(encoding="utf-8"))["shards"][0]


def test_files_have_the_lengths_of_the_model(entry):
    tokens, documents = entry["num_tokens"], entry["num_documents"]
    corpus = model.Corpus(lines=True, shard_tokens=tokens, document_tokens=tokens / documents)
    body, table = corpus.files[0]
    assert entry["tokens"]["bytes"] == pytest.approx(64 + body + table + 8 * math.ceil(body / model.PAGE) + 8, abs=16)
    assert entry["lines"]["bytes"] > corpus.files[1][1] == 8 * documents


def test_an_entry_of_the_manifest(entry):
    """That of a shard of 2^27 tokens, indented as in the file."""
    for name, length in (("tokens", 269_509_192), ("lines", 8_048_568)):
        entry[name]["bytes"] = length
    entry["num_tokens"], entry["num_documents"] = 2**27, 2**27 // 500
    with_entry, without = (json.dumps({"shards": [1, *[entry] * n]}, indent=2) for n in (1, 0))
    assert len(with_entry) - len(without) == model.ENTRY_BYTES


def test_the_share_of_tables_that_fits_is_found_in_the_cache():
    """A cache that evicts by a clock's hand, tokens before tables, while shards are asked for in random order."""
    random, num_shards, room = np.random.default_rng(0), 500, 200
    present, hand, fetched, num_blocks = np.zeros(num_shards, bool), 0, 0, 20_000
    for shard in random.permutation(np.arange(num_blocks) % num_shards):
        if not present[shard]:
            fetched += 1
            while present.sum() >= room:
                present[hand % num_shards], hand = False, hand + 1
            present[shard] = True
    size = model.Corpus(shard_tokens=40 * model.BLOCK_TOKENS, num_tokens=num_shards * 40 * model.BLOCK_TOKENS)
    assert size.num_blocks == num_blocks
    windows = model.Reading(size, 0).corpus.bodies[0] * 640
    reading = model.Reading(size, windows + room / num_shards * size.table_bytes)
    assert reading.kept == pytest.approx(room / num_shards)
    assert reading.table_fetches == pytest.approx(fetched, rel=0.03)


def test_an_epoch_by_hand():
    assert KEPT.kept == LINES.kept == 1 and 0 < LINES_DEFAULT.kept < DEFAULT.kept < 1
    assert KEPT.epoch("requests") == KEPT.corpus.num_blocks + KEPT.corpus.num_shards
    assert LINES.epoch("requests") == 2 * LINES.corpus.num_blocks + 3 * LINES.corpus.num_shards
    nothing = replace(KEPT, cache=0)
    assert nothing.epoch("requests") == 2 * KEPT.corpus.num_blocks
    assert nothing.epoch("bytes") == KEPT.corpus.num_blocks * (KEPT.corpus.bodies[0] + KEPT.corpus.tables[0])
    bare = replace(KEPT, latency=0.0)  # of 64 requests at a time at 85 MB/s each
    assert bare.window()["requests"] == pytest.approx(KEPT.corpus.bodies[0] / 85e6)


def test_more_nodes_fetch_more_and_shorten_no_epoch():
    runs = [model.Run("small", n, KEPT) for n in (1, 8, 16, 64, 256)]
    rates = [run.rate for run in runs]
    assert rates == sorted(rates) and rates[2:] == [min(KEPT.limits().values())] * 3
    assert rates[:2] == [run.wanted for run in runs[:2]]
    requests = [run.requests() for run in runs]
    assert requests == sorted(requests)  # of each node
    for reading in (KEPT, DEFAULT, LINES, LINES_DEFAULT):
        assert list(reading.limits().values()) == sorted(reading.limits().values())  # the order that the page names
        assert all(model.nodes_fed(reading, preset) > 1 for preset in model.PAPER)


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["store_model.py", *arguments])
    assert model.main() == 0
    return capsys.readouterr().out


def test_the_page_has_the_tables_that_are_printed(monkeypatch, capsys):
    text, printed = PAGE.read_text(encoding="utf-8"), run(monkeypatch, capsys)
    for title, table in model.tables(model.readings(model.Corpus())).items():
        assert table in text, f"docs/scale.md: {title} is not what bench/store_model.py prints"
        assert f"{title}\n\n{table}" in printed
    own = run(monkeypatch, capsys, "--tokens", "2e12", "--document-tokens", "800", "--latency", "30")
    corpus = model.Corpus(num_tokens=2e12, document_tokens=800)
    assert all(table in own for table in model.tables(model.readings(corpus, 30e-3)).values())


def numbers_in_the_text():
    corpus, lines, window, limits = KEPT.corpus, LINES.corpus, KEPT.window(), KEPT.limits()
    yield f"about {4.5 * corpus.num_tokens / 1e12:.0f} TB of text at 4.5 bytes per token: {corpus.num_shards:,} shards"
    windows = -(-corpus.num_blocks // model.WINDOW_BLOCKS)
    yield f"{corpus.num_blocks / 1e6:.1f} M blocks of 262,144, {windows:,} shuffle windows of 64 blocks"
    assert 2**27 / (2**29 / 4.5) == pytest.approx(1 + 1 / 8, rel=0.01)  # an eighth more shards
    yield f"one request of {corpus.bodies[0] / 1e3:.0f} KB"
    yield f"another, of {corpus.tables[0] / 1e6:.1f} MB"
    yield f"of which two, {sum(lines.tables[1:]) / 1e6:.1f} MB, are tables"
    yield f"take {corpus.table_bytes / 1e9:.0f} GB, with those of lines {lines.table_bytes / 1e9:.0f} GB"
    ratios = DEFAULT.epoch("bytes") / KEPT.epoch("bytes"), LINES_DEFAULT.epoch("bytes") / LINES.epoch("bytes")
    yield f"the default costs {ratios[0]:.1f} ({ratios[1]:.1f}) times the bytes"
    yield f"{256 * KEPT.epoch('bytes') / 1e15:.1f} PB for 20 TB"
    yield f"${256 * KEPT.epoch('bytes') * model.REGION_PRICE:,.0f} per epoch"
    # What is the limit.
    fed = [f"{model.nodes_fed(KEPT, preset):.0f} " for preset in model.PAPER]
    yield f"From {fed[0]}nodes on with `small`, {fed[1]}with `base` and {fed[2]}with `large`"
    rate = model.WINDOW_BLOCKS * corpus.bodies[0] / window["requests"]
    yield f"are {rate / 1e6:.0f} MB/s, {rate / model.NETWORK:.0%} of the network".replace("%", " %")
    tokens = model.WINDOW_BLOCKS * model.BLOCK_TOKENS
    work = window["checksums"] + window["packing"]
    assert limits["disk"] < tokens / work < limits["network"]
    yield f"the disk ({limits['disk'] / 1e6:.0f} M tokens/s), packing with checksums ({tokens / work / 1e6:,.0f} M)"
    yield f"shorten no epoch: {model.Run('large', 256, KEPT).epoch(limits['requests'])} whatever the preset"
    sent = limits["requests"] * KEPT.epoch("requests") / corpus.num_tokens
    yield f"All nodes then send {sent:.0f} requests/s each. From {model.PREFIX_REQUESTS / sent:.0f} nodes"
    yield f"lets a node follow {tokens / (window['requests'] / 4 + work) / 1e6:.0f} M tokens/s"
    yield f"and tables once ({corpus.table_bytes / 1e9:.0f} GB)"
    num_bytes = 2 * corpus.num_tokens
    yield f"{num_bytes / model.DISK / 3600:.1f} h at 2 GB/s and {256 * num_bytes / 1e15:.1f} PB for 256 nodes"
    # Less than an epoch.
    blocks = math.ceil(33e9 / model.BLOCK_TOKENS)
    yield f"are {blocks:,} blocks, ${blocks * model.GET_PRICE:.2f} and {2 * 33e9 / 1e9:.0f} GB per node"
    yield f"The default holds {model.DEFAULT_CACHE / 2 // 1e9:.0f} G tokens"
    manifest = corpus.num_shards * model.ENTRY_BYTES
    yield f"The first batch takes {KEPT.first_batch():.1f} s: a manifest of {manifest / 1e6:.0f} MB"
    yield f"({256 * 8 * manifest / 1e9:.0f} GB for 256 nodes), {model.OPENING_SECONDS} s to open it"
    yield f"{corpus.num_pages / 8e6:.0f} MB in a file that the node shares"
    yield f"{150_000 * model.ENTRY_BYTES / 1e6:.0f} MB, and nothing else"


def test_the_numbers_in_the_text():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [number for number in numbers_in_the_text() if number not in text] == []
