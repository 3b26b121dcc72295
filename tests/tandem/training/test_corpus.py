from pathlib import Path

from tandem.training.chat import cut_exchanges
from tandem.training.corpus import (
    NUM_HELD_OUT,
    Document,
    choose_held_out,
    held_out_paths,
    list_paths,
    load_documents,
    read_documents,
)


def test_no_held_out_file_is_trained_on() -> None:
    training, held_out = load_documents()
    assert len(held_out_paths()) == NUM_HELD_OUT
    assert {d.path for d in training}.isdisjoint(held_out_paths())
    assert {d.path for d in held_out} <= held_out_paths()
    assert len(training) > 300
    assert len(held_out) > 20  # later versions of Python dropped some of them


def test_tests_packages_and_tables_are_left_out(tmp_path: Path) -> None:
    files = {
        "a.py": "x = 1\n",
        "pkg/b.py": "y = 2\n",
        "test/c.py": "z = 3\n",
        "pkg/tests/d.py": "z = 3\n",
        "site-packages/e.py": "z = 3\n",
        "_sysconfigdata__x.py": "z = 3\n",
        "empty.py": " \n",
        "table.py": '""" Python Character Mapping Codec cp0 generated from a table. """\n',
        "notes.txt": "no source\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    documents = read_documents(tmp_path, list_paths(tmp_path))
    assert documents == [Document("a.py", "x = 1\n"), Document("pkg/b.py", "y = 2\n")]


def test_the_choice_depends_on_the_paths_alone() -> None:
    documents = [Document(f"m{i}.py", "x" * 3000) for i in range(50)]
    chosen = choose_held_out(documents, 5)
    assert chosen == choose_held_out(reversed(documents), 5)
    assert chosen == sorted(chosen)
    assert len(chosen) == 5
    assert choose_held_out([Document("short.py", "x"), *documents], 51) == sorted(d.path for d in documents)


def test_a_documented_function_is_an_exchange() -> None:
    source = (
        "class A:\n"
        "    def f(self):\n"
        '        """Return one.\n\n        More."""\n'
        "        return 1\n\n"
        "def g():\n"
        "    pass\n"
    )
    [exchange] = cut_exchanges(Document("a.py", source))
    assert exchange.startswith('<|user|>\nReturn one.\n<|assistant|>\ndef f(self):\n    """Return one.')
    assert exchange.endswith("    return 1\n<|endoftext|>")
    assert cut_exchanges(Document("broken.py", "def (:\n")) == []
