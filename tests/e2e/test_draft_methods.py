"""The drafting method of a request through real processes: the text is that of plain decoding, whatever drafts."""

import grpc
import httpx
import pytest

from specdec.v1 import generation_service_pb2 as pb
from tests.e2e.servers import collect, ids_of, request_of

NUM_TOKENS = 60
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
        wanted = "".join(piece.text for piece in plain)
        for number, method in enumerate(methods):
            if number % 2:
                pieces = collect(stack, with_options(request, method=method))
                assert ids_of(pieces) == ids_of(plain), method
                origins = {token.origin for piece in pieces for token in piece.token_metrics}
            else:
                body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_metrics": True, **params}
                (choice,) = stack.complete(prompt, **body, speculation={"method": method.split("+")})["choices"]
                assert choice["text"] == wanted, method
                origins = {token["origin"] for token in choice["token_metrics"]}
            drafted = origins & {"draft", "lookup"}
            assert drafted, method
            # Of a pair the lookup may know everything by now.
            assert drafted <= {"draft" if part == "draft_model" else "lookup" for part in method.split("+")}, method


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
