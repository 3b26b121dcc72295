"""A scripted engine: a server with the API of vLLM, in this process, that can be made to misbehave."""

import asyncio
import contextlib
import json
from collections import Counter

from tests.gateway.fakes import number


def toy_logprobs(token, count):
    """Log-probabilities of a position: the chosen token is the second most likely one."""
    top = {(token + 1) % 400: -0.25, token: -0.5, (token + 2) % 400: -1.5}
    return dict(list(top.items())[:count]) | {token: -0.5}


class FakeEngine:
    """``next_token(context, body)`` writes the text; the hooks below replace an answer or a part of one."""

    def __init__(self, next_token, tokenizer, *, owned_by="vllm", name="engine-model"):
        self.next_token = next_token
        self.tokenizer = tokenizer
        self.model = {"id": name, "object": "model", "owned_by": owned_by, "max_model_len": 512}
        self.models = [self.model]
        self.returns_token_ids = True
        self.health = self.tokenize = 200
        self.metrics = ""
        self.key = None
        self.delay_s = 0.0
        self.num_cached = 0
        self.eos = 0
        #: Tokens after which the connection breaks, or nothing comes any more.
        self.breaks_after = self.hangs_after = None
        #: Whether nothing is answered at all, on open connections neither.
        self.hangs = False
        #: ``(status, headers, body)`` for completions, each used once; and a line sent after the first token.
        self.refusals = []
        self.injected = None
        self.bodies = []
        self.headers = []
        self.num_open = 0
        self.num_left = 0
        self.num_connections = 0
        #: Requests for each path.
        self.asked = Counter()
        self.port = 0
        #: Context of TLS; None: plain text.
        self.tls = None
        self._tasks = set()

    @property
    def address(self):
        return f"openai+http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def serving(self):
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader, writer):
        line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, path, _ = line.split(" ")
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or "null")
        while self.hangs:  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(0.01)
        self.asked[path] += 1
        if self.key and path.startswith("/v1") and headers.get("authorization") != f"Bearer {self.key}":
            error = {"message": f"wrong key, not {headers.get('authorization')}", "code": 401}
            return self._answer(writer, 401, {"error": error})
        if (method, path) == ("POST", "/v1/completions"):
            return await self._complete(reader, writer, headers, body)
        if (method, path) == ("POST", "/tokenize"):
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return self._answer(writer, self.tokenize, {"tokens": ids, "count": len(ids)})
        pages = {
            "/health": (self.health, ""),
            "/v1/models": (200, {"object": "list", "data": self.models}),
            "/metrics": (200, self.metrics),
        }
        return self._answer(writer, *pages.get(path, (404, {"detail": "Not Found"})))

    def _answer(self, writer, status, content, headers=None):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        given = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n{given}\r\n".encode() + data)
        return True

    async def _complete(self, reader, writer, headers, body):
        is_trial = body["max_tokens"] == 1 and body["temperature"] == 0 and "top_k" not in body
        if not is_trial:
            self.bodies.append(body)
            self.headers.append(headers)
            if self.refusals:
                status, more, content = self.refusals.pop(0)
                return self._answer(writer, status, content, more)
        if not body.get("stream"):
            return self._answer(writer, 200, self._whole(body))
        self.num_open += 1
        left = asyncio.create_task(reader.read(1))  # a client that leaves
        stream = asyncio.create_task(self._stream(writer, body))
        try:
            await asyncio.wait((left, stream), return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                self.num_left += 1
                return False
            return stream.result()
        finally:
            self.num_open -= 1
            for task in (left, stream):
                task.cancel()
            await asyncio.wait((left, stream))

    def tokens_of(self, body):
        """The tokens of an answer, and why it ends."""
        context, out = list(body["prompt"]), []
        while len(out) < body["max_tokens"]:
            out.append(self.next_token([*context, *out], body))
            may_stop = len(out) > body.get("min_tokens", 0)
            if may_stop and out[-1] in body.get("stop_token_ids", ()):
                return out, "stop", out[-1]
            if may_stop and out[-1] == self.eos and not body.get("ignore_eos"):
                return out, "stop", None
        return out, "length", None

    def _whole(self, body):
        ids, reason, stop_reason = self.tokens_of(body)
        choice = {"index": 0, "text": "?", "finish_reason": reason, "stop_reason": stop_reason, "token_ids": ids}
        choice["logprobs"] = self._logprobs(body, ids)
        if not self.returns_token_ids:
            del choice["token_ids"]
        if "prompt_logprobs" in body:
            entry = {"rank": 2, "logprob": -0.5, "decoded_token": "?"}
            best = {"rank": 1, "logprob": -0.25, "decoded_token": "?"}
            rest = [{str((token + 1) % 400): best, str(token): entry} for token in body["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *rest]
        return {"id": "x", "object": "text_completion", "choices": [choice], "usage": self._usage(body, ids)}

    def _usage(self, body, ids):
        details = {"prompt_tokens_details": {"cached_tokens": self.num_cached}} if self.num_cached else {}
        return {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)} | details

    def _logprobs(self, body, ids):
        if "logprobs" not in body:
            return None
        assert body["return_tokens_as_token_ids"]
        tops = [toy_logprobs(token, body["logprobs"]) for token in ids]
        return {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [-0.5] * len(ids),
            "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for top in tops],
            "text_offset": [0] * len(ids),
        }

    async def _stream(self, writer, body):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        def send(data):
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def event(content):
            send(f"data: {json.dumps(content)}\n\n".encode())

        ids, reason, stop_reason = self.tokens_of(body)
        done = 0
        while done < len(ids):
            if done == self.hangs_after:
                await asyncio.sleep(60)
            if done == self.breaks_after:
                self.breaks_after = None
                return False
            if done and self.injected is not None:
                send(self.injected)
            size = 1 + number(done) % 3 if done else 1
            if self.breaks_after is not None or self.hangs_after is not None:
                size = 1
            step = ids[done : done + size]
            done += len(step)
            is_last = done == len(ids)
            choice = {"index": 0, "text": "?", "logprobs": self._logprobs(body, step), "token_ids": step}
            choice |= {"finish_reason": reason if is_last else None, "stop_reason": stop_reason if is_last else None}
            event({"id": "x", "object": "text_completion", "choices": [choice]})
            await writer.drain()
            await asyncio.sleep(self.delay_s)
        if body.get("stream_options", {}).get("include_usage"):
            event({"id": "x", "choices": [], "usage": self._usage(body, ids)})
        send(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True
