"""Serves a fine-tuned model over HTTP: a folder that `finetune` wrote, or its ONNX export, which needs no torch.

pip install electra-fast onnxruntime uvicorn "starlette>=1.6"; python examples/serve.py FOLDER localhost 8000
curl localhost:8000 -d '["a text", "another"]'    # prints predictions; requests that arrive together share a batch
"""

import asyncio
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

import electra_fast as ef

folder, host, port, most_waiting = (*sys.argv[1:], 1000)[:4]
BYTES = 1_000_000  # at most, per request
CHARACTERS = 20_000  # at most, per example
EXAMPLES = 100  # at most, per request
BATCH = 256  # examples that are computed together
model = ef.load(folder)
queue = asyncio.Queue()
stop = asyncio.Event()


async def predict(request):
    body = await request.json()
    examples = [body] if isinstance(body, str) else body
    if not isinstance(examples, list) or not all(isinstance(example, str | list) for example in examples):
        raise ValueError("send a text or a list of examples, each a text or a list of texts")
    if len(examples) > EXAMPLES or any(len("".join(example)) > CHARACTERS for example in examples):
        return JSONResponse(f"more than {EXAMPLES} examples, or than {CHARACTERS:,} characters in one", 413)
    if stop.is_set() or queue.qsize() >= int(most_waiting):
        return JSONResponse("stopping or busy", 503 if stop.is_set() else 429, {"Retry-After": "1"})
    queue.put_nowait((examples, future := asyncio.Future()))
    # Ids count within this request, not within the batch.
    answers = [a | {"id": str(i)} if "id" in a else a for i, a in enumerate(await future)]
    return JSONResponse(answers if examples is body else answers[0])


async def main():
    serving = asyncio.create_task(server.serve())
    alone = []
    server.handle_exit = lambda *signal: stop.set() or queue.put_nowait(([], asyncio.Future()))
    while alone or not queue.empty() or not stop.is_set():
        batch = alone[:1] or [await queue.get()]
        alone = alone[1:]
        while not alone and not queue.empty() and sum(len(examples) for examples, _ in batch) <= BATCH - EXAMPLES:
            batch.append(queue.get_nowait())
        try:
            texts = [example for examples, _ in batch for example in examples]
            answers = iter(await asyncio.to_thread(model.predict, texts))
            for examples, future in batch:
                future.set_result([next(answers) for _ in examples])
        except Exception as error:
            alone += batch if len(batch) > 1 else batch[0][1].set_exception(error) or []  # retried one by one
    server.should_exit = True
    await serving


errors = (ClientDisconnect, RecursionError, TypeError, ValueError)
app = Starlette(max_body_size=BYTES, exception_handlers=dict.fromkeys(errors, lambda _, e: JSONResponse(str(e), 400)))
app.add_route("/", predict, ["POST"])
facts = {"model": folder, "kind": model.kind, "labels": model.labels}
app.add_route("/health", lambda _: JSONResponse(facts | {"queue": queue.qsize()}, 503 if stop.is_set() else 200))
server = uvicorn.Server(uvicorn.Config(app, host, int(port), access_log=False, timeout_graceful_shutdown=10))
asyncio.run(main())
