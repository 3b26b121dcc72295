"""The corpus: source files of the Python standard library, some of them held out.

Tests, third-party packages and machine-made tables are left out. The held-out files are
chosen by a hash of their path, so the choice does not depend on the machine; the list that
was used is kept beside this file.
"""

import argparse
import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HELD_OUT_LIST = Path(__file__).with_name("held_out.txt")
NUM_HELD_OUT = 40

EXCLUDED_FOLDERS = frozenset({"__pycache__", "idle_test", "pydoc_data", "site-packages", "test", "tests", "turtledemo"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "plat-")
# Character tables written by a script: large, and nothing to learn from.
GENERATED_MARK = "Python Character Mapping Codec"


@dataclass(frozen=True)
class Document:
    """One source file: its POSIX path below the library's root, and its text."""

    path: str
    text: str


def library_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def list_paths(root: Path) -> list[str]:
    """POSIX paths of the usable source files below `root`, sorted."""
    paths = []
    for file in root.rglob("*.py"):
        relative = file.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts):
            continue
        if any(part.startswith(EXCLUDED_PREFIXES) for part in relative.parts):
            continue
        paths.append(relative.as_posix())
    return sorted(paths)


def read_documents(root: Path, paths: Iterable[str]) -> list[Document]:
    """Reads the files that are UTF-8, not empty and not machine-made."""
    documents = []
    for path in paths:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and GENERATED_MARK not in text[:400]:
            documents.append(Document(path, text))
    return documents


def choose_held_out(documents: Iterable[Document], count: int = NUM_HELD_OUT) -> list[str]:
    """The `count` paths with the smallest SHA-256 among files of 2 to 64 kB, sorted."""
    fitting = [d.path for d in documents if 2_000 <= len(d.text) <= 64_000]
    fitting.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    return sorted(fitting[:count])


@cache
def held_out_paths() -> frozenset[str]:
    """The committed list of held-out paths."""
    return frozenset(HELD_OUT_LIST.read_text(encoding="utf-8").split())


def load_documents() -> tuple[list[Document], list[Document]]:
    """Training and held-out documents of the running library."""
    root = library_root()
    documents = read_documents(root, list_paths(root))
    held_out = held_out_paths()
    training = [d for d in documents if d.path not in held_out]
    return training, [d for d in documents if d.path in held_out]


def main() -> None:
    """Prints the size of both parts; `--rewrite` chooses the held-out files again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rewrite", action="store_true", help="write held_out.txt again")
    if parser.parse_args().rewrite:
        root = library_root()
        chosen = choose_held_out(read_documents(root, list_paths(root)))
        HELD_OUT_LIST.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    for name, documents in zip(("training", "held out"), load_documents(), strict=True):
        size = sum(len(d.text.encode()) for d in documents)
        print(f"{name}: {len(documents)} files, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
