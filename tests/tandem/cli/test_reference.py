"""The lists of options in ``docs/`` are those the settings' classes make."""

from pathlib import Path

import pytest

from tandem.cli.reference import LISTS, fill, list_of

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_lists_of_a_page_are_made_from_the_settings(path: Path) -> None:
    page = path.read_text()
    assert fill(page) == page, "run `make docs`"
    assert page.count("<!-- options: ") == page.count("<!-- end of options -->")


@pytest.mark.parametrize("name", ["serve", "gateway", *LISTS])
def test_every_set_of_options_is_on_some_page(name: str) -> None:
    assert any(list_of(name) in path.read_text() for path in PAGES)
