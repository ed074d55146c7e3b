"""The Dockerfile without Docker: its steps in a folder, what they install, its health check and its entry point."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_tools import Runner
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from serve_tools import LiveServer, TLSServer, write_pair

import draftgraph.serve.run

DOCKER_STOP_SECONDS = 10
ABSOLUTE = re.compile(r"(?<=\s)/\w+")
STUB = '#!/bin/sh\necho "${{0##*/}} $*" >> {calls}\n'  # notes that it was called
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exec {has_torch}
echo "$*" >> {calls}
cp constraints.txt {used}
{has_torch} && exit
exec {python} "$@" --no-deps --no-build-isolation --no-index --quiet --disable-pip-version-check --target {packages}
"""


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M)
    found = [line.split(maxsplit=1) for line in text.replace("\\\n", "").splitlines() if line.strip()]
    return [(name, rest.strip()) for name, rest in found]


def only(name: str) -> str:
    (rest,) = [rest for found, rest in instructions() if found == name]
    return rest


def variables() -> dict[str, str]:
    pairs = [pair for name, rest in instructions() if name == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


class Image:
    """A folder in which the steps were run; programs that would change the machine only note their arguments."""

    def __init__(self, folder: Path, base_has_torch: bool) -> None:
        self.folder, self.packages, self._used = folder, folder / "packages", folder / "used"
        self._tools, self._calls = folder / "tools", folder / "calls"
        (folder / "app").mkdir()
        (folder / "var/lib/apt/lists/archive").mkdir(parents=True)
        self._tools.mkdir()
        for name in ("apt-get", "useradd", "chown"):
            self._tool(name, STUB.format(calls=self._calls))
        known = {"calls": self._calls, "used": self._used, "packages": self.packages, "python": sys.executable}
        self._tool("python3", PYTHON.format(has_torch=str(base_has_torch).lower(), **known))
        for name, rest in instructions():
            if name == "COPY":
                *sources, target = rest.split()
                subprocess.run(["cp", "-r", *sources, folder / "app" / target], cwd=REPOSITORY, check=True)
            elif name == "RUN":
                self._run(rest)

    def _tool(self, name: str, text: str) -> None:
        (self._tools / name).write_text(text)
        (self._tools / name).chmod(0o755)

    def _run(self, command: str) -> None:
        """With every path in the folder: some commands delete."""
        inside = ABSOLUTE.sub(lambda found: f"{self.folder}{found[0]}", command)
        assert all(path.startswith(str(self.folder)) for path in re.findall(r"\brm -rf (\S+)", inside))
        path = {"PATH": f"{self._tools}:/usr/bin:/bin"}
        done = subprocess.run(["sh", "-c", inside], cwd=self.folder / "app", env=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    @property
    def pins(self) -> dict[str, str]:
        lines = [line for line in self._used.read_text().splitlines() if not line.startswith("#")]
        return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return Image(tmp_path_factory.mktemp("image"), base_has_torch=False)


@pytest.fixture(scope="module")
def gpu_image(tmp_path_factory):
    return Image(tmp_path_factory.mktemp("gpu"), base_has_torch=True)


def entry(image, *arguments, **environment) -> subprocess.Popen:
    command = [*json.loads(only("ENTRYPOINT")), *arguments]
    paths = {"PATH": f"{image.packages / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(image.packages)}
    inside = {name: re.sub("^/", f"{image.folder}/", value) for name, value in variables().items()}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=paths | inside | environment, cwd=image.folder, **output)


def test_what_is_copied_suffices_to_install_and_start_it(image):
    assert (image.packages / "draftgraph" / "py.typed").is_file()
    process = entry(image, "--help")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "--api-keys" in out
    assert not list((image.folder / "app").iterdir())


def test_the_versions_are_those_that_are_tested_together(image):
    assert any("pip install" in call and "-c constraints.txt .[serve,otel]" in call for call in image.calls)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for needed in map(Requirement, project["dependencies"] + extras["serve"] + extras["otel"]):
        assert needed.specifier.contains(image.pins[canonicalize_name(needed.name)]), needed
    assert "triton" not in image.pins  # torch from PyPI needs one version of it alone
    assert not any(call.startswith("apt-get") for call in image.calls)


def test_a_base_with_torch_keeps_it_and_gets_a_compiler(image, gpu_image):
    assert image.pins.keys() - gpu_image.pins.keys() == {"torch"}
    (installed,) = [call for call in gpu_image.calls if call.startswith("apt-get install")]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(installed.split())
    assert not list((gpu_image.folder / "var/lib/apt/lists").iterdir())


def test_its_user_is_a_number_that_owns_the_cache(image):
    user = re.fullmatch(r"([1-9]\d*):\1", only("USER"))[1]
    assert any(call.startswith("useradd") and f"--uid {user}" in call for call in image.calls)
    assert f"chown {user}:{user} {image.folder}/cache" in image.calls
    assert (image.folder / only("VOLUME").lstrip("/")).is_dir()
    caches = {value for name, value in variables().items() if name.endswith(("CACHE", "HOME", "CACHE_DIR"))}
    assert len(caches) == 3 and all(value.startswith(only("VOLUME")) for value in caches)


def test_the_entry_point_becomes_the_server_and_hands_on_its_options(image, tmp_path):
    shown = tmp_path / "draftgraph"
    shown.write_text('#!/bin/sh\necho $$\nfor one in "$@"; do echo "$one"; done\n')
    shown.chmod(0o755)
    process = entry(image, "a model", "--max-texts", "3", PATH=f"{tmp_path}:/usr/bin:/bin", PORT="9000")
    pid, *arguments = process.communicate(timeout=20)[0].splitlines()
    assert int(pid) == process.pid  # signals reach it
    assert arguments == ["serve", "--host", "0.0.0.0", "--port", "9000", "a model", "--max-texts", "3"]


def test_its_variables_are_options_and_leave_time_to_stop(capsys, monkeypatch, folder):
    started = []
    monkeypatch.setattr(draftgraph.serve.run, "run", lambda settings, *_: started.append(settings))
    run = Runner(capsys, monkeypatch)
    monkeypatch.setenv("DRAFTGRAPH_GRACE", variables()["DRAFTGRAPH_GRACE"])
    monkeypatch.setenv("DRAFTGRAPH_PORT", "tcp://10.0.0.1:8000")  # as Kubernetes sets it for a Service of this name
    assert run("serve", folder, "--port", variables()["PORT"]).status == 0
    (settings,) = started
    assert settings.port == 8000 and only("EXPOSE") == "${PORT}"
    assert 5 <= settings.grace + draftgraph.serve.run.LAST_WORDS < DOCKER_STOP_SECONDS


def healthy(**environment: str) -> bool:
    python, *arguments = json.loads(only("HEALTHCHECK").partition("CMD")[2])
    assert python == "python3"
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, timeout=30)
    return done.returncode == 0


def test_the_health_check_asks_the_port_that_is_served():
    with LiveServer() as server:
        assert healthy(PORT=str(server.port))
        assert not healthy(PORT="9")
        server.engine.ready = None
        assert not healthy(PORT=str(server.port))


def test_the_health_check_knows_of_https(tmp_path):
    with TLSServer(**write_pair(tmp_path, "first")) as server:
        assert healthy(PORT=str(server.port), DRAFTGRAPH_TLS_CERT=server.settings.tls_cert)
        assert not healthy(PORT=str(server.port))
