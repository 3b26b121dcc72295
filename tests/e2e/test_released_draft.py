"""A draft service of an earlier release beside services of now."""

from tests.e2e.servers import ServerProcess, Stack, collect, ids_of, request_of


def test_an_older_draft_drafts_on_states(stack, prompts):
    draft = ServerProcess("tests.e2e.released_draft", stack.targets[0].address)
    running = Stack.start(stack.targets, [draft])
    try:
        for changes in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
            request = request_of(prompts[1] * 2, max_tokens=60, **changes)
            pieces = collect(running, request)
            speculation = pieces[-1].speculation
            assert speculation.num_draft_failures == 0, "\n".join(draft.log)
            assert speculation.num_accepted_draft_tokens > 5
            assert speculation.hidden_state_bytes == 2 * 384 * speculation.num_hidden_states > 0
            request.speculation.num_speculative_tokens = 0
            assert ids_of(pieces) == ids_of(collect(running, request))
    finally:
        running.close()
