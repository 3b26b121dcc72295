"""Hidden states of native passes: the same to the bit in any company, whatever rows and logits are asked for beside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from engine.native.rounded import quantise_linears
from tests.engine.native.conftest import MODELS, make_model, make_plan
from tests.engine.native.test_decoder import BLOCK, Runner, _ids

pytestmark = pytest.mark.usefixtures("kernels")

#: All that a model with three layers has, one of them twice.
LAYERS = (0, 1, 2, 3, -1, 1)


class StateRunner(Runner):
    def states(
        self,
        parts: Sequence[tuple[list[int], int, torch.Tensor]],
        rows: Sequence[int] | None = None,
        logit_rows: Sequence[int] = (),
        layers: Sequence[int] = LAYERS,
    ) -> torch.Tensor:
        """Parts (table, entries before, ids); states [R, layers, H] of the rows, of all unless told otherwise."""
        counts = [ids.shape[0] for _, _, ids in parts]
        plan = make_plan([start for _, start, _ in parts], counts, [table for table, _, _ in parts], self.block_size)
        wanted = torch.tensor(range(sum(counts)) if rows is None else rows, dtype=torch.int64)
        out = torch.full((len(wanted), len(layers), self.decoder.hidden_size), float("nan"), dtype=torch.bfloat16)
        self.logits = self.decoder.forward(
            torch.cat([ids for _, _, ids in parts]),
            plan,
            torch.tensor(logit_rows, dtype=torch.int64),
            (wanted, torch.tensor(layers), out),
        )
        assert bool(out.isfinite().all())
        return out


@torch.no_grad()
def _stock(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """States [n, LAYERS, H] of the stock model."""
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
    states = model(ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    by_number = dict(enumerate([*states[:-1], last[0]])) | {-1: states[-1]}
    return torch.stack([by_number[layer][0] for layer in LAYERS], 1).float()


@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_the_stock_model(name: str) -> None:
    model = make_model(name)
    ids = _ids(70)
    wanted = _stock(model, ids)
    runner = StateRunner(model)
    table, done, rows = runner.open(70), 0, []
    for count in (1, 20, 1, 5, 1, 1, 36, 5):
        rows.append(runner.states([(table, done, ids[done : done + count])]))
        done += count
    torch.testing.assert_close(torch.cat(rows).float(), wanted, atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("llama", torch.float32, None),
        ("llama-tied-odd", torch.float32, None),
        ("qwen2", torch.bfloat16, None),
        ("qwen3", torch.float32, "int8"),
    ],
)
def test_any_choice_of_rows_layers_and_logits_gives_the_same_bits(
    name: str, dtype: torch.dtype, quantization: str | None, threads: int
) -> None:
    model = make_model(name, dtype)
    if quantization:
        quantise_linears(model)
    runner = StateRunner(model, threads)
    ids, others = _ids(40), _ids(25, seed=5)
    table, beside = runner.open(40), runner.open(25)
    alone = torch.cat([runner.states([(table, i, ids[i : i + 1])]) for i in range(40)])
    logits = torch.cat([runner.feed([(table, i, ids[i : i + 1])])[0] for i in range(40)])

    row_choices: list[list[int] | None] = [None, [39], [0, 7, 8, 30], list(range(20, 40)), []]
    logit_choices = [[], [39], list(range(40)), [3, 30], [8, 8, 0]]
    for rows, wanted_logits in itertools.product(row_choices, logit_choices):
        for layers in (LAYERS, (-1,), (3,), (0, 2), (1, 1)):
            own = runner.states([(table, 0, ids)], rows, wanted_logits, layers)
            expected = alone if rows is None else alone[rows]
            assert torch.equal(own, expected[:, [LAYERS.index(layer) for layer in layers]])
            assert torch.equal(runner.logits, logits[wanted_logits])

    # Among others: a long prompt beside a round.
    together = runner.states([(beside, 0, others), (table, 35, ids[35:])], range(25, 30), [24, 28, 29])
    assert torch.equal(together, alone[35:])
    assert torch.equal(runner.logits[1:], logits[38:])


def test_many_rows_and_threads() -> None:
    """Where rows are prepared in stages of their own and the work of attention is shared out."""
    ids, wanted = _ids(700), None
    for threads in (1, 3):
        runner = StateRunner(make_model("llama", max_position_embeddings=1024), threads, block_size=32)
        table = runner.open(700)
        own = torch.cat(
            [
                runner.states([(table, 0, ids[:500])], logit_rows=[499]),
                runner.states([(table, 500, ids[500:690])]),
                runner.states([(table, 690, ids[690:])], logit_rows=range(10)),
            ]
        )
        wanted = own if wanted is None else wanted
        assert torch.equal(own, wanted)
    assert BLOCK != 32
