"""Networks of question answering, compared with the published formulas for single examples without packing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_task import save_encoder
from transformers import AutoModel

from electra_fast.finetuning.batches import pack
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.inference import Inference
from electra_fast.finetuning.model import Inputs
from electra_fast.finetuning.tasks.span_model import JointReader, TwoLogitReader
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.model.compute import ComputeConfig

CPU = torch.device("cpu")
BEAM = 5
LENGTHS = [(4, 20), (2, 3), (6, 30), (1, 1), (5, 14)]  # question and context; the fourth has fewer tokens than BEAM
COMPUTE = ComputeConfig("sdpa", torch.float32)


def examples():
    """Returns pairs whose second text has type 1 (BERT) or 0 (RoBERTa)."""
    random = np.random.default_rng(0)
    ids = []
    types = []
    for number, (question, context) in enumerate(LENGTHS):
        text = [random.integers(5, 60, length) for length in (question, context)]
        ids.append(np.concatenate(([2], text[0], [3], text[1], [3])))
        types.append(np.array([0] * (question + 2) + [number % 2] * (context + 1)))
    offsets = np.concatenate(([0], np.cumsum([len(tokens) for tokens in ids])))
    ids, types = (np.concatenate(arrays).astype(np.int32) for arrays in (ids, types))
    return EncodedExamples(ids, types, offsets, 0, (), np.array([question + 2 for question, _ in LENGTHS]))


def targets():
    """Returns spans in the context, [CLS] for a chunk without the answer, and an unanswerable question."""
    return torch.tensor([[8, 11, 0], [0, 0, 0], [9, 9, 0], [0, 0, 1], [8, 20, 0]])


@pytest.fixture(scope="module", params=["bert", "modernbert", "deberta"])
def encoder(request, tmp_path_factory, tiny_vocab):
    return save_encoder(tmp_path_factory.mktemp("encoder"), tiny_vocab, request.param)


def reader(encoder, kind, **arguments):
    loaded = load_encoder(encoder)
    model = kind(loaded.shape, BEAM, **arguments)
    model.load_encoder(loaded.state)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.normal_(0, 0.1, generator=random)
    return model.eval()


def reference_hidden(encoder, encoded):
    """Yields each example's hidden states from `transformers`, without padding, and a mask of context and [SEP]."""
    model = AutoModel.from_pretrained(encoder).eval()
    for i in range(len(encoded)):
        place = slice(encoded.offsets[i], encoded.offsets[i + 1])
        ids, types = (torch.tensor(column[place])[None].long() for column in (encoded.ids, encoded.token_types))
        inputs = {"input_ids": ids} | ({"token_type_ids": types} if model.config.model_type == "electra" else {})
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0]
        yield hidden, torch.arange(len(hidden)) >= int(encoded.second_starts[i])


def head(model):
    return {name: p.detach() for name, p in model.head.named_parameters()}


def joint_reference(p, hidden, is_context, beam=BEAM):
    """Returns the published head's start logits, a function from a start to end logits, and the answerable logit."""
    allowed = is_context.float()
    allowed[0] = 1
    start = hidden @ p["start.weight"][0] + p["start.bias"] + 1000 * (allowed - 1)

    def end(position):
        both = torch.cat((hidden[position].expand(len(hidden), -1), hidden), 1)
        inner = F.gelu(both @ p["end_dense.weight"].T + p["end_dense.bias"])
        return inner @ p["end.weight"][0] + p["end.bias"] + 1000 * (allowed - 1)

    feature = torch.cat((hidden[0], start.softmax(0) @ hidden))
    inner = F.gelu(p["answerable_dense.weight"] @ feature + p["answerable_dense.bias"])
    return start, end, inner @ p["answerable.weight"][0] + p["answerable.bias"][0]


def test_joint_losses_equal_the_published_formula(encoder):
    encoded = examples()
    expected = targets()
    model = reader(encoder, JointReader, answerable_weight=0.7)
    part = pack(encoded, np.arange(5))[0]
    with torch.no_grad():
        losses = model.losses(Inputs.of(part, CPU), expected[part.examples], COMPUTE)
    for i, (hidden, is_context) in enumerate(reference_hidden(encoder, encoded)):
        start, end, unanswerable = joint_reference(head(model), hidden, is_context)
        at, to, impossible = expected[i].tolist()
        loss = (F.cross_entropy(start, torch.tensor(at)) + F.cross_entropy(end(at), torch.tensor(to))) / 2
        loss += 0.7 * F.binary_cross_entropy_with_logits(unanswerable, torch.tensor(float(impossible)))
        assert float(losses[list(part.examples).index(i)]) == pytest.approx(float(loss), rel=1e-5)


def assert_highest(places, scores, reference):
    """Asserts that the places have the highest reference scores. Rounding may change their order."""
    places = places.tolist()
    assert len({*places}) == len(places) == min(BEAM, int((reference > -900).sum()))
    highest = reference.topk(len(places)).values
    np.testing.assert_allclose(reference[places], highest, atol=1e-5)
    np.testing.assert_allclose(scores, highest, atol=1e-5)


def test_joint_predictions_equal_a_beam_search(encoder):
    encoded = examples()
    model = reader(encoder, JointReader)
    starts, start_scores, ends, end_scores, null = Inference(model, COMPUTE).by_example(encoded)
    for i, (hidden, is_context) in enumerate(reference_hidden(encoder, encoded)):
        start, end, unanswerable = joint_reference(head(model), hidden, is_context)
        beam = min(BEAM, len(hidden))
        possible = start_scores[i, :beam] > -900
        assert_highest(starts[i, :beam][possible], start_scores[i, :beam][possible], start.log_softmax(0))
        for k in possible.nonzero()[0]:
            allowed = end_scores[i, k, :beam] > -900
            reference = end(int(starts[i, k])).log_softmax(0)
            assert_highest(ends[i, k, :beam][allowed], end_scores[i, k, :beam][allowed], reference)
        assert null[i] == pytest.approx(float(unanswerable), abs=1e-5)
        assert (start_scores[i, beam:] < -900).all() and np.isfinite(start_scores[i]).all()


def test_two_logit_losses_equal_transformers(encoder):
    """The softmax includes the tokens of the question, as in `transformers`."""
    encoded = examples()
    expected = targets()
    model = reader(encoder, TwoLogitReader)
    part = pack(encoded, np.arange(5))[0]
    with torch.no_grad():
        losses = model.losses(Inputs.of(part, CPU), expected[part.examples], COMPUTE)
        logits = two_logits(model, encoder, encoded)
    for i, (start, end, _) in enumerate(logits):
        loss = (F.cross_entropy(start, expected[i, 0]) + F.cross_entropy(end, expected[i, 1])) / 2
        assert float(losses[list(part.examples).index(i)]) == pytest.approx(float(loss), rel=1e-5)


def two_logits(model, encoder, encoded):
    p = head(model)
    for hidden, is_context in reference_hidden(encoder, encoded):
        if "dense.weight" in p:  # ModernBertPredictionHead
            inner = F.gelu(hidden @ p["dense.weight"].T)
            hidden = F.layer_norm(inner, inner.shape[1:], p["norm.weight"], None, 1e-5)
        yield *(hidden @ p["classifier.weight"].T + p["classifier.bias"]).unbind(1), is_context


def test_two_logit_predictions_add_start_and_end(encoder):
    encoded = examples()
    model = reader(encoder, TwoLogitReader)
    starts, start_scores, ends, end_scores, null = Inference(model, COMPUTE).by_example(encoded)
    for i, (start, end, allowed) in enumerate(two_logits(model, encoder, encoded)):
        allowed[0] = True
        count = min(BEAM, int(allowed.sum()))
        for places, scores, logits in ((starts, start_scores, start), (ends[:, 0], end_scores[:, 0], end)):
            assert_highest(places[i, :count], scores[i, :count], logits.where(allowed, torch.tensor(-1e9)))
        assert (ends[i] == ends[i, :1]).all()
        assert null[i] == pytest.approx(float(start[0] + end[0]), abs=1e-5)
