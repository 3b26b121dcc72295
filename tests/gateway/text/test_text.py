"""Tokenizers from files, text from tokens as they come, stop strings in pieces."""

import json
import time

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.chat_template import ChatTemplate, read_template
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopFinder, Stopped, StopStrings
from gateway.text.tokenizer import TextTokenizer
from specdec.errors import InvalidRequest
from tests.gateway.text import vocabularies

BYTE_LEVEL = TextTokenizer(vocabularies.byte_level(), {"bos_token": "<|endoftext|>"})
SENTENCEPIECE = TextTokenizer(vocabularies.sentencepiece_like(), {})
WORD_PIECE = TextTokenizer(vocabularies.word_piece(), {})
SAMPLES = [
    "Hello world!",
    "",
    " leading and trailing ",
    "Größe naïve 東京 🙂👩‍👩‍👧 “quotes”",
    "two  spaces\n\nand lines\t",
    vocabularies.TEXT,
]


def id_of(tokenizer, token):
    return next(token_id for token_id in range(tokenizer.size) if tokenizer.raw_token(token_id) == token)


def pieces_of(tokenizer, token_ids, **options):
    reader = Detokenizer(tokenizer, **({"skip_special_tokens": True} | options))
    return [*(reader.feed(token_id) for token_id in token_ids), reader.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_byte_level_text_comes_back(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == text == BYTE_LEVEL.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(max_size=40))
@settings(max_examples=200)
def test_any_text_comes_back_without_broken_characters(text):
    text = text.replace("<|", "")
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = pieces_of(tokenizer, ids)
        expected = text if tokenizer is BYTE_LEVEL or not ids else " " + text
        assert "".join(pieces) == expected.replace("\u2581", " ") or "\u2581" in text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, BYTE_LEVEL.size - 1), max_size=60))
@settings(max_examples=300)
def test_random_tokens_give_the_text_of_the_whole(token_ids):
    for skip in (True, False):
        streamed = "".join(pieces_of(BYTE_LEVEL, token_ids, skip_special_tokens=skip))
        assert streamed == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


def test_sentencepiece_keeps_the_space_before_a_word():
    ids = [id_of(SENTENCEPIECE, token) for token in ("▁the", "▁fox", "fox")]
    assert pieces_of(SENTENCEPIECE, ids) == [" the", " fox", "fox", ""]
    euro = [id_of(SENTENCEPIECE, f"<0x{byte:02X}>") for byte in "€".encode()]
    assert pieces_of(SENTENCEPIECE, [*euro, ids[0]]) == ["", "", "€", " the", ""]
    assert pieces_of(SENTENCEPIECE, euro[:2]) == ["", "", "\ufffd"]


def test_tokens_without_text_of_their_own_are_read_in_a_window():
    ids = [id_of(WORD_PIECE, token) for token in ("the", "fox", "##es", "jump", "over", "the", "fox", "!")]
    pieces = pieces_of(WORD_PIECE, ids)
    assert "".join(pieces) == "the foxes jump over the fox!"
    assert pieces[:3] == ["the", " fox", "es"]
    assert pieces_of(WORD_PIECE, ids[2:4], context=ids[:2]) == ["es", " jump", ""]


def test_special_tokens():
    ids = BYTE_LEVEL.encode("a<|user|>b", add_special_tokens=False)
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == "ab"
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip_special_tokens=False)) == "a<|user|>b"
    assert BYTE_LEVEL.token_bytes(10**6) == b""


def split(text, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def find(pieces, stops, include=False):
    finder, out = StopFinder(StopStrings(stops), include=include), ""
    for piece in pieces:
        result = finder.feed(piece)
        if isinstance(result, Stopped):
            return out + result.text, result.stop
        out += result
        full = "".join(pieces)
        assert full.startswith(out)
    return out + finder.flush(), None


def oracle(text, stops, include):
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=10),
    st.booleans(),
)
@settings(max_examples=500)
def test_stop_strings_do_not_depend_on_the_pieces(text, stops, cuts, include):
    assert find(split(text, cuts), stops, include) == oracle(text, stops, include)


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=40),
    st.text("ab", max_size=40),
)
@settings(max_examples=500)
def test_many_stop_strings_that_overlap_are_found_and_held_back_as_one_by_one(text, stops, another_text):
    shared = StopStrings(stops)
    for sample in (text, another_text, text):
        finder, given_out = StopFinder(shared), ""
        for end, character in enumerate(sample, 1):
            result = finder.feed(character)
            if isinstance(result, Stopped):
                assert (given_out + result.text, result.stop) == oracle(sample, stops, False)
                break
            given_out += result
            held = next(n for n in range(end, -1, -1) if any(stop.startswith(sample[end - n : end]) for stop in stops))
            assert given_out == sample[: end - held]
        else:
            assert oracle(sample, stops, False) == (sample, None)
            assert given_out + finder.flush() == sample


def test_the_work_of_a_character_does_not_grow_with_the_number_of_stop_strings():
    """100,000 strings took 10 ms a character when each was searched for."""
    text = "def f(x): return x + stop_1 # " * 400

    def seconds(stops):
        stops = StopStrings(stops)
        started = time.thread_time()
        assert StopFinder(stops).feed(text) + StopFinder(stops).feed(text) == 2 * text
        return time.thread_time() - started

    few = min(seconds([f"<stop_{i}>" for i in range(10)]) for _ in range(5))
    many = min(seconds([f"<stop_{i}>" for i in range(100_000)]) for _ in range(5))
    assert many < 10 * few


def test_no_more_is_held_back_than_needed():
    finder = StopFinder(StopStrings(["</end>"]))
    assert finder.feed("abc<") == "abc"
    assert finder.feed("/e") == ""
    assert finder.feed("x") == "</ex"
    assert finder.feed("<</end") == "<"
    assert finder.flush() == "</end"


@pytest.mark.parametrize("layout", ["tokenizer.json", "gpt2", "opt", "plain"])
def test_files_give_the_ids_that_transformers_gives(tmp_path, layout):
    if layout == "tokenizer.json":
        vocabularies.save(vocabularies.byte_level(), tmp_path)
    elif layout == "opt":
        config = {"add_bos_token": True, "bos_token": "<|user|>", "eos_token": "<|endoftext|>"}
        vocabularies.save_as_gpt2(tmp_path, **config)
    elif layout == "gpt2":
        vocabularies.save_as_gpt2(tmp_path, eos_token="<|endoftext|>")
    else:
        vocabularies.save_as_gpt2(tmp_path)
    ours = TextTokenizer.load(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*SAMPLES, "a<|endoftext|>b"]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_unreadable_tokenizers_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidRequest, match="does not exist"):
        TextTokenizer.load(tmp_path / "none")
    with pytest.raises(InvalidRequest, match=r"neither tokenizer\.json nor vocab\.json.*; give --tokenizer"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("not json")
    with pytest.raises(InvalidRequest, match="is not JSON"):
        TextTokenizer.load(tmp_path)


def test_chat_templates_are_found(tmp_path):
    folder = vocabularies.save(vocabularies.byte_level(), tmp_path, chat_template="in config")
    assert TextTokenizer.load(folder).chat_template == "in config"
    (folder / "chat_template.jinja").write_text("in file")
    assert TextTokenizer.load(folder).chat_template == "in file"
    several = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    other = vocabularies.save(vocabularies.byte_level(), tmp_path / "b", chat_template=several)
    assert TextTokenizer.load(other).chat_template == "yes"
    assert TextTokenizer.load(vocabularies.save(vocabularies.byte_level(), tmp_path / "c")).chat_template is None


def test_chat_templates_render_in_a_sandbox(tmp_path):
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}"
    messages = [{"role": "user", "content": "<ö>"}]
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == '<s>[user]"<ö>"'
    with pytest.raises(InvalidRequest, match="refused the messages: only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render(messages)
    with pytest.raises(InvalidRequest, match="refused"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(messages)
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})
    path = tmp_path / "template.jinja"
    path.write_text("{{ 1 + 1 }}")
    assert read_template(str(path)) == read_template("{{ 1 + 1 }}")
    with pytest.raises(InvalidRequest, match="neither Jinja text nor a file"):
        read_template("no/such/file")


def test_chat_template_is_the_one_transformers_renders(tmp_path):
    source = (
        vocabularies.CHAT_TEMPLATE + "{% if x is defined %}{{ x | tojson }}{% endif %}\n  {% if true %}\n!{% endif %}"
    )
    folder = vocabularies.save(vocabularies.byte_level(), tmp_path, chat_template=source)
    messages = [{"role": "user", "content": "hé <b>"}, {"role": "assistant", "content": "a\n"}]
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, x={"k": "<"})
    ours = TextTokenizer.load(folder)
    assert (
        ChatTemplate(ours.chat_template, ours.special_tokens).render(messages, variables={"x": {"k": "<"}}) == expected
    )
    assert json.dumps(expected)
