"""``tandem bench`` with tiny numbers: the runs themselves."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.errors import Unavailable
from tandem.bench import systems
from tandem.bench.huggingface import MODES, HuggingFace
from tandem.checkpoints import MODELS
from tandem.cli import main as cli
from tandem.launcher.supervisor import ServiceSpec
from tests.e2e.fork_server import forked_services

__all__ = ["forked_services"]

DRAFTERS = ("draft_model", "suffix")
TINY = ["--num-prompts", "2", "--max-tokens", "16", "--prompt-tokens", "16", "--fixed-draft-length"]


@pytest.fixture
def drafts_open_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a text of so few tokens ends before the draft is there."""
    services_of = systems.services_of

    def services(*args: Any, **options: Any) -> list[ServiceSpec]:
        return [
            replace(service, module="tests.e2e.draft_first_gateway") if service.module == "gateway" else service
            for service in services_of(*args, **options)
        ]

    monkeypatch.setattr(systems, "services_of", services)


@pytest.mark.e2e
@pytest.mark.usefixtures("drafts_open_first", "forked_services")
def test_several_drafters_over_grpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    # Without pacing, which may find that nothing pays off in so few tokens. A draft that the target asks is opened
    # after the target: it takes part in a text that is not too short.
    flags = ["--k", "3", "--fixed-draft-length", "--drafter", ",".join(DRAFTERS), "--batch-size", "1,2"]
    flags += ["--max-tokens", "64"]
    assert cli.main(["bench", *TINY, *flags, *files]) == 0
    printed = capsys.readouterr().out
    for text in ("plain", *DRAFTERS, "1 session", "2 sessions", "acceptance per token", "limit", "torch"):
        assert text in printed
    sections = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert [section["num_sessions"] for section in sections] == [1, 2]
    for section in sections:
        assert list(section["modes"]) == ["plain", *DRAFTERS]
        assert all(len(mode["tokens_per_s"]) == 2 for mode in section["modes"].values())
        assert all(set(mode["itl_ms"]) == {"p50", "p90", "p99"} for mode in section["modes"].values())
        assert 0 < section["modes"]["plain"]["target_busy"] < 1
        drafted = section["modes"]["draft_model"]
        assert 0 <= drafted["alpha"] <= 1
        assert 1 <= drafted["acceptance_length"] <= 4
    alone = sections[0]["modes"]["draft_model"]  # of several rounds in a step the target may cut what does not pay off
    assert min(alone[name] for name in ("decode_ms", "verify_ms", "draft_ms", "c", "wire_bytes")) > 0
    assert alone["serial_limit"] <= alone["overlapped_limit"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.exhaustive
@pytest.mark.usefixtures("drafts_open_first", "forked_services")
def test_a_target_that_pretends_is_marked_in_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--synthetic-acceptance-length", "2.5", "--k", "2", "--json", str(out)]
    assert cli.main(["bench", *TINY, "--max-tokens", "200", *flags]) == 0
    mark = "SYNTHETIC ACCEPTANCE LENGTH 2.5"
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert printed.startswith(mark)
    assert report["title"].startswith(mark)
    assert report["notes"][0].startswith(mark)
    mode = report["sections"][0]["modes"]["draft_model"]
    assert "num_compared" not in mode, "these texts are not the model's"
    assert mode["acceptance_length"] == pytest.approx(2.5, abs=0.15)


def test_acceptance_lengths_are_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--acceptance-lengths", "1,2", "--drafter", "suffix", "--text", "code", "--services", "embedded"]
    assert cli.main(["bench", "--num-prompts", "1", "--max-tokens", "32", *flags]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["_metadata"] == {"drafter": "suffix"}
    assert 1 <= found["python-12m"]["code"][2] <= 3


def test_two_embedded_sessions_under_two_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("def a(b):\nclass C:\nimport os\n")
    arguments = ["--services", "embedded", "--batch-size", "2", "--temperature", "1", "--rules", "token,coupled"]
    assert cli.main(["bench", "--fixed-draft-length", "--max-tokens", "16", "--prompts", str(prompts), *arguments]) == 0
    printed = capsys.readouterr().out
    for text in ("2 sessions", "draft_model, token", "draft_model, coupled", "temperature 1", "mine.txt", "2 x 2"):
        assert text in printed


def test_a_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema, out = tmp_path / "schema.json", tmp_path / "out.json"
    form = {
        "type": "object",
        "properties": {"id": {"enum": [17, 28]}},
        "required": ["id"],
        "additionalProperties": False,
    }
    schema.write_text(json.dumps(form))
    arguments = [
        "--services",
        "embedded",
        "--k",
        "3",
        "--num-prompts",
        "1",
        "--max-tokens",
        "64",
        "--fixed-draft-length",
    ]
    assert cli.main(["bench", *arguments, "--structured", str(schema), "--json", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("1 session, prose, with the schema", "answers that fit the schema: plain 1 of 1", "filling masks"):
        assert text in printed
    free, bound = json.loads(out.read_text())["sections"]
    assert (free["structured"], bound["structured"]) == (False, True)
    for mode in bound["modes"].values():
        assert (mode["num_fitting"], mode["num_cut_off"]) == (1, 0)
    assert 0 <= bound["modes"]["draft_model"]["mask_wait_ms"] < bound["modes"]["draft_model"]["verify_ms"]
    assert bound["modes"]["draft_model"]["mask_fill_ms"] > free["modes"]["draft_model"]["mask_fill_ms"] == 0


def test_a_lookup_is_measured_without_a_draft_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--services", "embedded", "--drafter", "ngram", *TINY]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "ngram, 1 sessions: no parts of a round, no draft service takes part" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "python-12m"], "nothing to compare"),
        (["--model", "python-1m", "--drafter", "draft_model"], "needs a model"),
        (["--model", "python-1m", "--drafter", "suffix+draft_model"], "needs a model"),
        (["--drafter", "ngram,crystal"], "crystal; choose from"),
        (["--rules", "block,coin"], "coin; choose from"),
        (["--rules", "all"], "give --temperature"),
        (["--k", "0"], "k is 0"),
        (["--structured", "missing.json"], "missing.json holds no JSON schema"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--batch-size", "4,0"], "batch_size is 0"),
        (["--pad-target", "much"], "200M"),
        (["--pad-target", "1M"], "it is larger"),
        (["--prompt-tokens", "1000000"], "ask for fewer"),
        (["--url", "http://127.0.0.1:1", "--drafter", "ngram"], "leave --drafter out"),
        (["--url", "http://127.0.0.1:1", "--plain-url", "http://127.0.0.1:2", "--k", "2"], "leave --k and --rules out"),
        (["--url", "grpc://127.0.0.1:1", "--extra-body", '{"a": 1}'], "--extra-body is for HTTP"),
        (["--plain-url", "http://127.0.0.1:1"], "give --url, too"),
        (["--json", "no/such/out.json"], "--json names a file in no/such, which is no folder; make it first"),
        (["--plot", "no/such/out.png"], "--plot names a file in no/such"),
        (["--synthetic-acceptance-length", "6"], "with k = 4 it is 1 to 5"),
        (["--synthetic-acceptance-length", "2", "--services", "embedded"], "a target of its own"),
        (["--synthetic-acceptance-length", "2", "--acceptance-lengths"], "leave --acceptance-lengths out"),
        (["--acceptance-lengths", "--k", "3"], "leave --k out"),
        (["--acceptance-lengths", "--drafter", "eagle3-tree"], "eagle3-tree drafts trees"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_nobody_at_the_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", "out.png"]) == 2
    assert "pip install 'tandem-specdec[bench]'" in capsys.readouterr().err


async def test_hugging_face_runs_every_mode() -> None:
    models = {"target": str(MODELS / "python-12m"), "draft": str(MODELS / "python-1m"), "dtype": "float32"}
    rival = await HuggingFace.start({**models, "device": "cpu", "threads": 1, "k": 2, "temperature": 0.0})
    try:
        assert rival.modes(1) == list(MODES)
        assert rival.modes(2) == ["HF generate"]
        for mode in MODES:
            assert await rival.run(mode, [[5, 6, 7, 8]], 8) > 0
        assert await rival.run("HF generate", [[5, 6, 7, 8], [9]], 8) > 0
        with pytest.raises(Unavailable, match="Hugging Face: "):
            await rival.run("HF generate", [[10**6]], 8)
    finally:
        await rival.close()
