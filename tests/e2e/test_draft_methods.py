"""The drafting method of a request through real processes: the text is that of plain decoding, whatever drafts."""

import grpc
import httpx
import pytest

from specdec.v1 import generation_service_pb2 as pb
from tests.e2e.servers import collect, ids_of, request_of

NUM_TOKENS = 60
#: Requests until one is drafted for: while the gateway stands still, the target may end a text that nothing waits for.
MAX_TRIES = 20
#: Greedy, and with a seed.
PARAMS = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 11})


def test_text_is_that_of_plain_decoding(stack, prompts):
    """Half of them over REST, half over gRPC. Of a text that repeats, lookups find the rest."""
    methods = [each["name"] for each in httpx.get(f"{stack.base_url}/services").json()["methods"]]
    assert len(methods) == 7
    prompt = prompts[1] * 2
    for params in PARAMS:
        request = request_of(prompt, max_tokens=NUM_TOKENS, **params)
        plain = collect(stack, with_options(request, num_speculative_tokens=0))
        text = "".join(piece.text for piece in plain)
        for number, method in enumerate(methods):
            complete, wanted = (over_grpc, ids_of(plain)) if number % 2 else (over_rest, text)
            for _ in range(MAX_TRIES):
                generated, origins = complete(stack, prompt, method, params)
                assert generated == wanted, method
                drafted = origins & {"draft", "lookup"}
                if drafted:
                    break
            assert drafted, method
            # Of a pair the lookup may know everything by now.
            assert drafted <= {"draft" if part == "draft_model" else "lookup" for part in method.split("+")}, method


def over_grpc(stack, prompt, method, params):
    """The tokens, and where they came from."""
    pieces = collect(stack, with_options(request_of(prompt, max_tokens=NUM_TOKENS, **params), method=method))
    return ids_of(pieces), {token.origin for piece in pieces for token in piece.token_metrics}


def over_rest(stack, prompt, method, params):
    """The text, and where its tokens came from."""
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_metrics": True, **params}
    (choice,) = stack.complete(prompt, **body, speculation={"method": method.split("+")})["choices"]
    return choice["text"], {token["origin"] for token in choice["token_metrics"]}


def with_options(request, **options):
    result = pb.GenerateRequest(return_token_metrics=True, speculation=pb.SpeculationOptions(**options))
    result.MergeFrom(request)
    return result


def test_what_is_not_offered_is_refused(stack, prompts):
    answer = httpx.post(
        f"{stack.base_url}/v1/completions", json={"prompt": prompts[0], "speculation": {"method": "eagle3"}}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "method")
    request = with_options(request_of(prompts[0], max_tokens=4), method="eagle3")
    with pytest.raises(grpc.RpcError, match="this server offers draft_model, ngram, suffix") as caught:
        collect(stack, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
