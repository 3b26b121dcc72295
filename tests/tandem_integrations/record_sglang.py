"""Records the interface of SGLang that ``tandem_integrations.sglang`` uses, from its source; nothing is imported.

::

    pip download --no-deps sglang==0.5.23 && unzip sglang-*.whl -d sglang
    python tests/tandem_integrations/record_sglang.py sglang > tests/tandem_integrations/sglang.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

#: File, class ("" for none) and function: its parameters are recorded.
FUNCTIONS = [
    ("speculative/spec_info.py", "SpeculativeAlgorithm", "register"),
    ("speculative/spec_registry.py", "CustomSpecAlgo", "__init__"),
    ("speculative/spec_registry.py", "CustomSpecAlgo", "is_ngram"),
    ("speculative/spec_registry.py", "CustomSpecAlgo", "has_draft_kv"),
    ("speculative/spec_registry.py", "CustomSpecAlgo", "handle_server_args"),
    ("speculative/ngram_worker.py", "NGRAMWorker", "__init__"),
    ("speculative/ngram_worker.py", "NGRAMWorker", "_prepare_draft_tokens"),
    ("speculative/ngram_worker.py", "NGRAMWorker", "_update_ngram_corpus"),
    ("managers/schedule_batch.py", "ScheduleBatch", "grammar_needs_sync"),
    ("distributed/parallel_state.py", "GroupCoordinator", "broadcast_object"),
    ("distributed/parallel_state.py", "", "get_tp_group"),
]
#: File, class and attributes that are set in it or declared by it.
ATTRIBUTES = [
    ("speculative/ngram_worker.py", "NGRAMWorker", ["draft_token_num", "enable_overlap", "topk"]),
    ("speculative/ngram_info.py", "NgramVerifyInput", ["accept_tokens", "accept_lens"]),
    ("managers/schedule_batch.py", "Req", ["rid", "origin_input_ids_unpadded", "output_ids"]),
    ("managers/schedule_batch.py", "ScheduleBatch", ["reqs", "spec_info"]),
    ("distributed/parallel_state.py", "GroupCoordinator", ["rank_in_group"]),
    ("configs/model_config.py", "ModelConfig", ["context_len", "vocab_size"]),
]
#: Arguments of the server, declared in any of these files.
ARGUMENTS = [
    "attention_backend",
    "attn_dp_size",
    "device",
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "max_running_requests",
    "page_size",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
]


def body_of(path: Path, name: str) -> list[ast.AST]:
    """The nodes of a class, or of a file."""
    tree: ast.AST = ast.parse(path.read_text())
    if name:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return list(ast.walk(tree))


def parameters(path: Path, owner: str, name: str) -> list[str]:
    """Names of a function's parameters."""
    found = next(node for node in body_of(path, owner) if isinstance(node, ast.FunctionDef) and node.name == name)
    given = found.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def attributes(path: Path, owner: str) -> set[str]:
    """Names that a class declares or sets."""
    names = set()
    for node in body_of(path, owner):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for each in ast.walk(target) if target is not None else ():
                names |= {each.attr} if isinstance(each, ast.Attribute) else set()
                names |= {each.id} if isinstance(each, ast.Name) else set()
    return names


def main() -> None:
    """Write what was found to standard output."""
    package = Path(sys.argv[1], "sglang", "srt")
    version = next(Path(sys.argv[1]).glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    functions = {
        f"{owner}.{name}".strip("."): parameters(package / file, owner, name) for file, owner, name in FUNCTIONS
    }
    for file, owner, names in ATTRIBUTES:
        missing = set(names) - attributes(package / file, owner)
        assert not missing, f"{owner} has no {missing}"
    declared = set().union(
        *(attributes(path, "") for path in [package / "server_args.py", *package.glob("arg_groups/fields/*.py")])
    )
    assert set(ARGUMENTS) <= declared, set(ARGUMENTS) - declared
    found = {
        "version": version,
        "functions": functions,
        "attributes": {owner: names for _, owner, names in ATTRIBUTES} | {"ServerArgs": ARGUMENTS},
    }
    print(json.dumps(found, indent=1))


main()
