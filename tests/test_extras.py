"""Optional packages: what is said where one is missing adds it to the installation that is there."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftgraph import extras
from draftgraph.errors import UsageError
from draftgraph.extras import install_command, needed

REPOSITORY = "https://example.org/draftgraph.git"


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The package lies among others, and this is recorded of where it came from."""

    def made(origin: str | None) -> None:
        monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
        monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: origin))

    return made


def test_a_checkout_is_named_by_its_folder():
    folder = Path(extras.__file__).parents[1]
    assert install_command("serve") == f"pip install -e '{folder}[serve]'"


def test_what_came_from_an_index_is_found_there(installed):
    installed(None)
    assert install_command("serve") == "pip install 'draftgraph[serve]'"


def test_what_came_from_a_repository_is_taken_from_the_same_commit(installed):
    installed(
        json.dumps({"url": REPOSITORY, "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "v1"}})
    )
    assert install_command("serve") == f"pip install 'draftgraph[serve] @ git+{REPOSITORY}@abc'"


def test_what_came_from_a_file_is_taken_from_it(installed):
    installed(json.dumps({"url": "https://example.org/draftgraph-1-py3-none-any.whl", "archive_info": {}}))
    wheel = "https://example.org/draftgraph-1-py3-none-any.whl"
    assert install_command("serve") == f"pip install 'draftgraph[serve] @ {wheel}'"


def test_what_came_from_a_folder_is_taken_from_it_while_it_is_there(installed, tmp_path):
    folder = tmp_path / "my checkout"
    installed(json.dumps({"url": folder.as_uri(), "dir_info": {}}))
    assert install_command("serve") == "pip install '.[serve]' in a checkout of draftgraph"
    folder.mkdir()
    assert install_command("serve") == f"pip install '{folder}[serve]'"


@pytest.mark.parametrize("origin", ["no JSON", "[]"])
def test_a_record_that_cannot_be_read_is_none(installed, origin):
    installed(origin)
    assert install_command("serve") == "pip install 'draftgraph[serve]'"


def test_a_package_that_is_not_installed_has_no_record(installed, monkeypatch):
    def missing(name):
        raise PackageNotFoundError

    installed(None)
    monkeypatch.setattr(extras, "distribution", missing)
    assert install_command("serve") == "pip install 'draftgraph[serve]'"


@pytest.mark.parametrize(("module", "name"), [("no_such_package", None), ("json", "no_such_name")])
def test_what_is_missing_is_said_with_who_needs_it(module, name):
    with pytest.raises(UsageError) as missing:
        needed(module, "a test needs it", "serve", name)
    assert str(missing.value) == f"a test needs it: {install_command('serve')}"
    assert needed("json", "a test needs it", "serve", "dumps") is json.dumps
