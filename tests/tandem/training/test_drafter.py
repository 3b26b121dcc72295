"""Every method learns on a target that is itself trained, and leaves files that draft."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from engine.heads.dflash import DFlashHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.files.checkpoint import read_head
from engine.heads.mlp_speculator import MlpSpeculator
from specdec.errors import InvalidRequest
from tandem.cli.main import main
from tandem.training import fit, lesson_store
from tandem.training.drafter import train_drafter, work_folder
from tandem.training.fit import Fit
from tandem.training.settings import TrainSettings

SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": {"hidden_size": 24, "head_dim": 8, "num_kv_heads": 1, "draft_vocab_size": 200, "unroll_steps": 3},
    "eagle": {"unroll_steps": 2},
    "mtp": {"unroll_steps": 2},
    "dflash": {"block_size": 4, "num_layers": 1, "num_anchors": 16},
    "dspark": {
        "block_size": 4,
        "num_layers": 1,
        "markov_rank": 8,
        "markov_type": "gated",
        "hidden_size": 24,
        "head_dim": 8,
        "num_kv_heads": 1,
        "draft_vocab_size": 200,
    },
    "medusa": {"num_predict": 3},
    "mlp": {"num_predict": 3, "inner_dim": 24, "tie_weights": True},
    "draft": {"hidden_size": 24, "num_heads": 3, "num_kv_heads": 1, "num_layers": 1},
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(target: Path, data: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    def make(method: str, **options: Any) -> TrainSettings:
        given: dict[str, Any] = {
            "num_rows": 64,
            "row_length": 64,
            "prompt_length": 16,
            "num_held_out_rows": 16,
            "num_steps": 80,
            "batch_tokens": 512,
            "warmup_steps": 10,
            "rate": 1e-2,
            "eval_steps": 40,
            "num_speculative_tokens": 3,
            **SHAPES[method],
            **options,
        }
        return TrainSettings(
            method=method, target=str(target), output=str(tmp_path / "output"), data=(str(data),), **given
        )

    return make


@pytest.mark.parametrize(
    "method",
    [
        *("eagle3", "mlp", "draft"),
        *(
            pytest.param(method, marks=pytest.mark.exhaustive)
            for method in ("eagle", "mtp", "medusa", "dflash", "dspark")
        ),
    ],
)
def test_a_drafter_learns_and_loads(
    method: str, settings: Callable[..., TrainSettings], target: Path, tmp_path: Path
) -> None:
    history = train_drafter(settings(method))
    first, trained, rounded = history[0], history[-2], history[-1]
    assert [measured.step for measured in history] == [0, 40, 80, 80]
    assert trained.loss < 0.7 * first.loss
    assert trained.acceptance.length > 1.7, "of 4 at most; chance is about 1"
    assert rounded.acceptance.length == pytest.approx(trained.acceptance.length, abs=0.1)
    assert {file.name for file in tmp_path.iterdir()} == {"output"}
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    attends = method not in ("medusa", "mlp")
    assert config.get("draft_window_size") == (settings(method).row_length if attends else None)
    if method == "draft":
        assert AutoTokenizer.from_pretrained(tmp_path / "output").eos_token_id == 0
        return
    head = read_head(tmp_path / "output", target)
    assert head.method == {"mlp": "mlp_speculator"}.get(method, method)
    stored = load_file(next((tmp_path / "output").glob("*.safetensors")))
    assert {value.dtype for name, value in stored.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    if isinstance(head, Eagle3Head):
        assert head.hidden_state_layers == (1, 2, 3)
        assert head.t2d.sum() == len(head.d2t) == 200
    if isinstance(head, DFlashHead):
        assert head.config.max_tokens == (3 if method == "dflash" else 4)
        assert head.config.owns_mask == (method == "dflash")
        assert head.hidden_state_layers == (1, 2, 3)
    if isinstance(head, MlpSpeculator):
        assert head.config.tie_weights
        assert len(config["top_k_tokens_per_head"]) == head.config.n_predict
    if method == "eagle":  # vLLM: true means biases of the attention, and fc has none
        assert config["bias"] is False
        assert "fc.bias" not in stored
    if method == "medusa":  # vLLM drops the biases else
        assert config["medusa_fc_bias"] is True


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


def test_an_interrupted_training_ends_as_if_it_had_not_been(
    settings: Callable[..., TrainSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson_store, "PART_ROWS", 24)
    whole = settings("eagle3", num_steps=12, eval_steps=5)
    train_drafter(whole)

    broken = replace(whole, output=str(tmp_path / "resumed"), checkpoint_minutes=0.0)
    write_lessons, calls = lesson_store.write_lessons, []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write_lessons(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lesson_store, "write_lessons", fail)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(broken)
    with pytest.raises(InvalidRequest, match="resume it, or remove the folder"):
        train_drafter(broken)
    with pytest.raises(InvalidRequest, match="seed is 2, but the interrupted training"):
        train_drafter(replace(broken, seed=2, resume=True))

    save = Fit.save

    def save_and_fail(self: Fit) -> None:
        save(self)
        if self.schedule.step == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "save", save_and_fail)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(replace(broken, resume=True))
    assert not Path(broken.output).exists()
    history = train_drafter(replace(broken, resume=True))
    assert history[0].step == 10
    resumed, uninterrupted = tensors_of(tmp_path / "resumed"), tensors_of(tmp_path / "output")
    assert resumed.keys() == uninterrupted.keys()
    for name, value in uninterrupted.items():
        assert torch.equal(resumed[name], value), name


def test_training_goes_on_from_a_published_head(settings: Callable[..., TrainSettings], tmp_path: Path) -> None:
    first = settings("mlp", num_steps=20, eval_steps=20)
    [*_, last] = train_drafter(first)
    second = replace(first, output=str(tmp_path / "second"), start_from=first.output, num_steps=1, rate=1e-6)
    assert train_drafter(second)[0].loss == pytest.approx(last.loss, abs=1e-4)
    other = replace(settings("eagle3"), output=str(tmp_path / "third"), start_from=first.output)
    with pytest.raises(InvalidRequest, match="holds a mlp_speculator, not a eagle3"):
        train_drafter(other)
    assert {file.name for file in tmp_path.iterdir()} == {"output", "second"}


def test_a_loss_that_is_no_number_ends_the_training(
    settings: Callable[..., TrainSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of = fit.lesson_loss
    monkeypatch.setattr(fit, "lesson_loss", lambda *args: loss_of(*args) * float("nan"))
    with pytest.raises(Exception, match="no number any more"):
        train_drafter(settings("medusa"))


@pytest.mark.exhaustive
def test_the_time_limit_ends_a_training_early(settings: Callable[..., TrainSettings]) -> None:
    short = {"max_minutes": 0.01, "num_rows": 16, "num_held_out_rows": 4}
    history = train_drafter(settings("mlp", num_steps=10**4, eval_steps=10**4, **short))
    assert 1 <= history[-1].step < 10**4


def test_the_command(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["train", "mlp", "--target", str(target), "--data", str(data), "--output", str(tmp_path / "mlp")]
    small = ["--num-rows", "16", "--row-length", "48", "--prompt-length", "16", "--num-held-out-rows", "4"]
    small += ["--num-steps", "2", "--batch-tokens", "96", "--inner-dim", "16"]
    assert main([*call, *small]) == 0
    shown = capsys.readouterr()
    assert "step 0: held-out loss" in shown.out
    assert shown.out.splitlines()[-1].startswith(f"{tmp_path / 'mlp'}: held-out loss")
    assert "training: 100%" in shown.err
    assert json.loads((tmp_path / "mlp" / "config.json").read_text())["model_type"] == "mlp_speculator"


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["mlp", "--data", "nowhere.txt"], 2, "data nowhere.txt does not exist"),
        (["mlp", "--data", "{short}"], 2, "too few for rows"),
        (["mlp", "--data", "{short}", "--target", "{strange}"], 1, "cannot be loaded as a causal language model"),
        (["mlp", "--output", "{short}"], 2, "exists already"),
        (["mlp", "--layers", "1,2,3"], 2, "layers is no option of mlp"),
        (["eagle3", "--layers", "1,2,9"], 1, "has no hidden state 9: there are 0 to 3, and -1"),
        (["eagle3", "--num-heads", "3", "--num-kv-heads", "2"], 2, "3 heads cannot share 2 key-value heads"),
        (["mlp", "--row-length", "20"], 2, "row_length is 20"),
        (["mlp", "--resume"], 2, "nothing to resume"),
        (["mlp", "--device", "tape"], 2, "choose auto, cpu or cuda:N"),
        (["mlp", "--num-rows", "1000000000"], 2, "lower num_rows"),
    ],
)
def test_mistakes_are_named(
    flags: list[str],
    status: int,
    text: str,
    *,
    target: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short, strange = tmp_path / "short.txt", tmp_path / "strange"
    short.write_text("too short")
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "abacus"}')
    given = [flag.format(short=short, strange=strange) for flag in flags]
    call = ["train", *given]
    for name, value in (("--target", target), ("--data", data), ("--output", tmp_path / "output")):
        call += [] if name in given else [name, str(value)]
    assert main([*call, "--num-held-out-rows", "2", *([] if "--num-rows" in given else ["--num-rows", "2"])]) == status
    assert text in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_a_list_that_is_none_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "eagle3", "--layers", "1,x"])
    assert end.value.code == 2
    assert "'1,x' is no list of whole numbers such as 1,8" in capsys.readouterr().err


def test_work_lies_beside_the_output(settings: Callable[..., TrainSettings]) -> None:
    made = settings("mlp")
    assert work_folder(made).name == "output.training"
    assert work_folder(made).parent == Path(made.output).parent
