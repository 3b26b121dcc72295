"""What a draft service sends."""

import pytest

from specdec.errors import InvalidRequest
from specdec.rpc.draft_stream import DraftStream
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import types_pb2 as pb


class Stream:
    def __init__(self, answer):
        self._answer = answer

    def post(self, message):
        pass

    async def receive(self):
        return self._answer


@pytest.mark.parametrize(("proposal", "problem"), [
    (pb.Proposal(token_ids=[1, 2], q_rows=[pb.SparseRow()]), "2 tokens has 1 q_rows"),
    (pb.Proposal(token_ids=[1, 2], parents=[-1]), "2 tokens has 1 parents"),
    (pb.Proposal(token_ids=[1, 2], parents=[-1, 1]), r"parents\[1\] is 1"),
    (pb.Proposal(token_ids=[1, 2], parents=[-2, 0]), r"parents\[0\] is -2"),
])  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
async def test_proposals_whose_parts_do_not_fit(proposal, problem, is_first):
    proposals = [proposal, pb.Proposal()] if is_first else [pb.Proposal(), proposal]
    answer = draft_pb.DraftResponse(proposal=proposals[0], more_proposals=proposals[1:])
    session = DraftStream(Stream(answer), draft_pb.DraftRequest())
    with pytest.raises(InvalidRequest, match=problem):
        await session.receive()
