"""States from bytes to tensors."""

import pytest
import torch

from draft_service.state_rows import StateRows, tensor_of
from specdec.sessions import HiddenStates


def made(start, rows, dtype=torch.bfloat16):
    data = rows.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return HiddenStates(start, rows.shape[1], str(dtype).removeprefix("torch."), data)


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 2), (2, 3), (9,)], ids=str)
def test_rows_are_those_that_came(sizes):
    rows = torch.randn(sum(sizes), 6)
    blocks = [made(0, part) for part in torch.split(rows, list(sizes))]
    room = StateRows(5, 6)
    assert torch.equal(room.fill(blocks), rows.bfloat16())
    assert torch.equal(tensor_of(blocks), rows.bfloat16())


def test_the_same_memory_serves_the_next_verdict():
    room = StateRows(5, 6)
    first = room.fill([made(0, torch.zeros(2, 6))])
    rows = torch.randn(2, 6)
    assert room.fill([made(2, rows)]) is first
    assert torch.equal(first, rows.bfloat16())


def test_wider_types_come_as_float32():
    rows = torch.randn(2, 6)
    assert torch.equal(StateRows(5, 6).fill([made(0, rows, torch.float32)]), rows)
    assert StateRows(5, 6).fill([made(0, rows, torch.float16)]).dtype == torch.float32
