"""The documentation: its site builds without a warning, every link leads somewhere, and its Python runs."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from conftest import REPOSITORY

import draftgraph

MODULES = ("", ".config", ".decoder", ".distillation.recipe", ".graph.token_graph", ".hook", ".inspect.report")
MODULES += (".pair", ".stats")
LISTS_AND_TABLES = re.compile(r"^(- |\d+\. |\|)", re.MULTILINE)


class Html(HTMLParser):
    """What a page refers to and loads, the names of its places, and its paragraphs."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.paragraphs: list[str] = []
        self._open = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        address = given.get("href") or given.get("src") or given.get("srcset")
        if address and tag == "a":
            self.links.append(address)
        elif address:
            self.loaded.append(address)
        if tag == "p":
            self._open = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {file: Html(file) for file in site.rglob("*.html") if file.name not in ("404.html", "all.html")}


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Html]) -> None:
    missing = []
    for file, page in pages.items():
        for address in (*page.links, *page.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            wanted = unquote(parts.fragment)
            found = target.is_file() and (not wanted or target not in pages or wanted in pages[target].names)
            missing += [] if found else [f"{file.name}: {address}"]
    assert missing == []


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, Html]) -> None:
    assert [(file.name, one) for file, page in pages.items() for one in page.loaded if urlsplit(one).netloc] == []


def test_lists_and_tables_are_shown_as_such(pages: dict[Path, Html]) -> None:
    """Those that GitHub shows, but that need an empty line before them here."""
    wrong = [(file.name, text) for file, page in pages.items() for text in page.paragraphs]
    assert [(name, text) for name, text in wrong if LISTS_AND_TABLES.search(text)] == []


def test_the_reference_shows_every_public_name(pages: dict[Path, Html], site: Path) -> None:
    assert {f"draftgraph.{name}" for name in draftgraph.__all__} <= pages[site / "reference.html"].names


@pytest.fixture(scope="module")
def pair(default_model_file: Path) -> draftgraph.Pair:
    return draftgraph.load()


@pytest.mark.model
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str, pair: draftgraph.Pair) -> None:
    module: ModuleType = importlib.import_module(f"draftgraph{name}")
    known = {each: getattr(draftgraph, each) for each in draftgraph.__all__} | {"draftgraph": draftgraph, "pair": pair}
    result = doctest.testmod(module, extraglobs=known)
    assert result.failed == 0 and result.attempted


@pytest.mark.model
@pytest.mark.usefixtures("default_model_file")
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_first_python_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(compile(code, page, "exec"), {})
    assert capsys.readouterr().out
