"""A target and a draft with recurrent states through real processes: kills, conversations, many sessions at once."""

import pytest

from specdec.v1 import generation_service_pb2 as pb
from tests.e2e.servers import Stack, collect, collect_together, draft_process, ids_of, request_of, target_process
from tests.hybrids import save_hybrid

NUM_TOKENS = 48
#: Of a text whose service is killed: most of it is still to come when the kill takes effect.
NUM_TOKENS_OF_KILLED = 160


@pytest.fixture(scope="module", params=["gated delta net", "mamba2"])
def hybrid(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    target = target_process("--dtype", "float32", model=save_hybrid(folder / "target", request.param))
    draft = draft_process(
        *("--dtype", "float32", "--num-speculative-tokens", "4"),
        model=save_hybrid(folder / "draft", request.param, noise=0.01),
    )
    running = Stack.start([target], [draft])
    yield running
    running.close()


def request(prompt, *, is_plain=False, max_tokens=NUM_TOKENS, **fields):
    options = pb.SpeculationOptions(num_speculative_tokens=0) if is_plain else None
    return pb.GenerateRequest.FromString(
        request_of(prompt, max_tokens=max_tokens, **fields).SerializeToString()
        + pb.GenerateRequest(speculation=options, return_token_metrics=True).SerializeToString()
    )


def test_many_sessions_at_once_and_one_by_one(hybrid, prompts):
    for params in ({}, {"temperature": 0.9, "seed": 4}):
        wanted = [ids_of(collect(hybrid, request(prompt, is_plain=True, **params))) for prompt in prompts]
        assert collect_together(hybrid, [request(prompt, **params) for prompt in prompts]) == wanted
    pieces = collect(hybrid, request(prompts[0]))
    assert "draft" in {token.origin for piece in pieces for token in piece.token_metrics}


def test_killed_services_leave_no_trace_in_the_text(hybrid, prompts):
    for prompt, process in ((prompts[1], hybrid.drafts[0]), (prompts[2], hybrid.targets[0])):

        def kill(process=process):
            process.kill()
            process.restart_on_same_port()

        wanted = ids_of(collect(hybrid, request(prompt, is_plain=True, max_tokens=NUM_TOKENS_OF_KILLED)))
        pieces = collect(hybrid, request(prompt, max_tokens=NUM_TOKENS_OF_KILLED), acts={12: kill})
        assert ids_of(pieces) == wanted
        assert pieces[-1].speculation.num_draft_failures + pieces[-1].speculation.num_target_failures >= 1


def test_a_conversation_goes_on_where_it_ended_or_is_fed_again(hybrid):
    """Some turns continue what was said; others take back some of it, which the states may not allow."""
    text = [*range(100, 110)]
    turn = [*text, *ids_of(collect(hybrid, request(text, session_id="chat"))), 300]
    for number, tokens in enumerate((turn, turn[:-30], [*turn[:14], 77, 78], turn)):
        wanted = ids_of(collect(hybrid, request(tokens, is_plain=True)))
        assert ids_of(collect(hybrid, request(tokens, session_id="chat"))) == wanted, number


def test_the_end_of_a_conversation_is_found_again(hybrid):
    """A turn that continues all that was said feeds only what is new."""
    text = [*range(200, 260)]
    answer = ids_of(collect(hybrid, request(text, session_id="long chat")))
    turn = [*text, *answer, 300, 301]
    pieces = collect(hybrid, request(turn, session_id="long chat"))
    assert pieces[-1].usage.cached_tokens >= len(turn) - 4
    assert ids_of(pieces) == ids_of(collect(hybrid, request(turn, is_plain=True)))
