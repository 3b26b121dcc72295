"""Hidden states in int8: what they are rounded to, byte by byte, and back."""

import struct

import pytest
import torch

from engine.rounded_states import round_states, tensor_of_states
from specdec.types import HiddenStates


def test_the_layout_of_a_row():
    states = torch.tensor([[2.0, -1.0, 0.5, 254.0], [0.0, 0.0, 127.0, -127.0]])
    rows = round_states(states, 2)
    data = struct.pack("<2bf2bf", 127, -64, 2 / 127, 0, 127, 2.0) + struct.pack("<2bf2bf", 0, 0, 0, 127, -127, 1)
    assert rows.numpy().tobytes() == data
    back = tensor_of_states(HiddenStates(5, 4, "int8", data, 2))
    torch.testing.assert_close(back, torch.tensor([[2.0, -64 * 2 / 127, 0.0, 254.0], [0.0, 0.0, 127.0, -127.0]]))


@pytest.mark.parametrize("group_size", [32, 96])
def test_the_error_is_half_a_step_of_its_own_group(group_size):
    states = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 96)
    data = round_states(states.bfloat16(), group_size).numpy().tobytes()
    known = HiddenStates(0, 96, "int8", data, group_size)
    assert known.num_positions == 9
    assert known.row_bytes == 96 + 4 * 96 // group_size
    back = torch.cat([tensor_of_states(known.rows(0, 4)), tensor_of_states(known.rows(4, 9))])
    exact = states.bfloat16().float().unflatten(1, (-1, group_size))
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert ((back.unflatten(1, (-1, group_size)) - exact).abs() <= 0.5001 * step).all()


def test_other_types_are_read_as_they_are():
    states = torch.randn(3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        data = states.to(dtype).view(torch.uint8).numpy().tobytes()
        read = tensor_of_states(HiddenStates(0, 4, str(dtype).removeprefix("torch."), data))
        assert torch.equal(read, states.to(dtype))
