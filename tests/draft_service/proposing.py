"""One round of a client without concurrency."""

from collections.abc import Sequence

from specdec.types import Proposal


async def propose(session, base_len: int, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
    """Commit tokens; the first proposal for them."""
    await session.advance(base_len, token_ids, num_draft_tokens)
    committed_len = base_len + len(token_ids)
    if num_draft_tokens <= 0:
        return Proposal(session.opened.epoch, committed_len, ())
    while (proposal := await session.receive()).base_len != committed_len:
        pass
    return proposal
