"""What is true of the package as a whole: quiet, offline, complete when built, small files, no machine's paths."""

import configparser
import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import draftgraph

REPOSITORY = Path(__file__).resolve().parent.parent
MACHINE_PATH = re.compile(r"(?<![\w.~$})>*/-])/(?:home|root|work|Users)/\w[^\s\"'`)]*")


GENERATED = {".venv", "__pycache__", "build", "dist", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def repository_files() -> list[Path]:
    """Files of the repository: tracked ones, and new ones that git does not ignore."""
    if not (REPOSITORY / ".git").exists():  # an unpacked sdist
        files = [path for path in REPOSITORY.rglob("*") if path.is_file()]
        return [path for path in files if not GENERATED.intersection(path.relative_to(REPOSITORY).parts)]
    # A checkout owned by another user is still only read.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_import_is_quiet_and_uses_no_network(run_without_network):
    done = run_without_network("import draftgraph")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_swallowed_connection_is_still_seen(run_without_network):
    done = run_without_network(
        "import contextlib, socket\nwith contextlib.suppress(OSError): socket.create_connection(('127.0.0.1', 9))"
    )
    assert done.returncode == 0
    assert "network: socket.getaddrinfo" in done.stderr


def test_wheel_metadata_says_what_it_is(wheel):
    info = f"draftgraph-{draftgraph.__version__}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["Name"] == "draftgraph"
    assert metadata["Version"] == draftgraph.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert scripts["console_scripts"]["draftgraph"] == "draftgraph.cli:main"


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    names = {path.relative_to(REPOSITORY).as_posix() for path in repository_files()}
    assert packaged == {name for name in names if name.startswith("draftgraph/")}
    assert "draftgraph/py.typed" in packaged


def test_no_python_file_is_over_850_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in repository_files() if path.suffix == ".py"}
    assert {str(path): length for path, length in lengths.items() if length > 850} == {}


def test_no_file_names_a_path_of_one_machine():
    found = {}
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture or a checkpoint
            continue
        if matches := MACHINE_PATH.findall(text):
            found[str(path.relative_to(REPOSITORY))] = matches
    assert found == {}
