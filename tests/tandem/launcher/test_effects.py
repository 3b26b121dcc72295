"""No option of our own is silent about having no effect beside the others."""

import pytest

from tandem.launcher.effects import without_effect
from tests.tandem.cli.test_flags import deploy


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), []),
        (("--device", "cpu", "--gpu-memory-utilization", "0.5"), ["gpu_memory_utilization"]),
        (("--device", "cpu", "--cpu-kv-cache-share", "0.5"), []),
        (("--device", "cuda", "--cpu-kv-cache-share", "0.5", "--autotune", "off"), ["cpu_kv_cache_share", "autotune"]),
        (("--kv-cache-memory-bytes", "99999999", "--cpu-kv-cache-share", "0.5"), ["cpu_kv_cache_share"]),
        (("--tensor-parallel-timeout-s", "5"), ["tensor_parallel_timeout_s"]),
        (("-tp", "2", "--tensor-parallel-timeout-s", "5"), []),
        (("--allow-credentials", "--allowed-methods", "GET"), ["allowed_methods", "allow_credentials"]),
        (("--allowed-origins", "http://a", "--allow-credentials"), []),
        (("python-12m", "--verification", "token", "--fixed-draft-length"), ["fixed_draft_length", "verification"]),
        (("--verification", "token", "--fixed-draft-length"), []),
        (("python-12m", "-sc", '{"method": "ngram"}', "--draft-timeout-s", "2"), ["draft_timeout_s"]),
    ],
)
def test_an_option_without_effect_is_named(argv: tuple[str, ...], named: list[str]) -> None:
    assert [name for name, _ in without_effect(deploy(*argv))] == named
