"""Serves an encoder or a fine-tuned classifier over HTTP with onnxruntime; the server needs no torch.

    pip install onnxruntime tokenizers
    electra-fast export run --out model --onnx      # of a fine-tuned model: docs/use-your-encoder.md
    python examples/onnx_serving.py model/encoder 8000
    curl localhost:8000 -d '["a text", "another"]'

An encoder answers with embeddings (the mean over the tokens), a classifier with labels and their probabilities.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder, port = Path(sys.argv[1]), int(sys.argv[2])
config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_truncation(config["max_position_embeddings"])
tokenizer.enable_padding(pad_id=config["pad_token_id"])
session = onnxruntime.InferenceSession(folder / "model.onnx")
INPUTS = [each.name for each in session.get_inputs()]
COLUMNS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


def answer(texts):
    """Returns an embedding or a label per text."""
    encodings = tokenizer.encode_batch(texts)
    rows = {name: np.array([getattr(each, COLUMNS[name]) for each in encodings], np.int64) for name in INPUTS}
    output = session.run(None, rows)[0]
    if output.ndim == 3:  # last_hidden_state [texts, tokens, width]
        mask = rows["attention_mask"][:, :, None]
        return ((output * mask).sum(1) / mask.sum(1)).tolist()
    odds = np.exp(output - output.max(1, keepdims=True))  # of logits [texts, labels]
    probability, best = odds / odds.sum(1, keepdims=True), odds.argmax(1)
    return [{"label": config["id2label"][str(i)], "score": float(p[i])} for i, p in zip(best, probability, strict=True)]


class Handler(BaseHTTPRequestHandler):
    """Answers JSON lists of texts."""

    def do_POST(self):  # noqa: D102, the name that http.server calls
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers = answer(texts)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answers).encode())


server = ThreadingHTTPServer(("localhost", port), Handler)
print(f"listening on http://localhost:{server.server_port}", flush=True)
server.serve_forever()
