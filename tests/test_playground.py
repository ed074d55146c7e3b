"""The playground, driven in a browser against a server whose engine only pretends (`playground_tools.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playground_tools import ANSWERS, SKY, VERIFIED, Pretender, drafted_steps, plain_steps, running
from starlette.testclient import TestClient

from draftgraph.inspect.text import label
from draftgraph.inspect.theme import DARK, LIGHT
from draftgraph.serve.playground import modes, playground_files

SOURCES = ("target", "draft", "merged", "copied", "recycled")
QUESTION = "Why is the sky blue?"
STEPS = list(drafted_steps(SKY))


# What is served


def test_only_the_page_s_own_files_are_served_each_with_its_type() -> None:
    client = TestClient(Pretender().app())
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name in playground_files():
        answer = client.get(f"/playground/{name}")
        assert answer.status_code == 200 and answer.content
        kind = kinds.get(name.rpartition(".")[2], "application/json")
        assert answer.headers["content-type"].startswith(kind), name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    assert client.get("/").content == client.get("/playground/index.html").content
    for other in ("__init__.py", "..%2f__init__.py", "%2e%2e/%2e%2e/config.py", "nothing.js", ""):
        assert client.get(f"/playground/{other}").status_code == 404, other
    assert client.post("/").status_code == 405


def test_nothing_comes_from_outside_and_nothing_stands_inline() -> None:
    for name, content in playground_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?:|//[a-z]+\.|@import|url\(", text) == [], name
        assert (
            re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text) == []
        ), name
    page = playground_files()["index.html"].decode()
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", page) == []


def test_modes_and_colours_are_the_package_s_own() -> None:
    files = playground_files()
    assert json.loads(files["modes.json"]) == modes()
    assert modes()["auto"]["k"]["default"] == 8 and "tau" not in modes()["tree"] and modes()["off"] == {}
    for theme in (LIGHT, DARK):
        for color in (theme.background, theme.draft, theme.merged, theme.copied, theme.recycled, theme.accepted):
            assert color in files["theme.css"].decode()


# In a browser


class Page:
    """The playground in a browser, and the server behind it."""

    def __init__(self, browser: Any, server: Pretender, address: str) -> None:
        self.browser, self.server, self.address = browser, server, address
        browser.get(address)
        self.wait(lambda: self.script("return document.body.dataset.ready === 'true'"))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def wait(self, condition: Callable[[], Any], seconds: float = 20) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, seconds, 0.02).until(lambda _: condition())

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, id: str) -> Any:
        return self.browser.find_element("id", id)

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    @property
    def focused(self) -> str:
        return str(self.script("const one = document.activeElement; return one.id || one.name || one.tagName"))

    @property
    def answer(self) -> str:
        return str(self.script("return Array.from(document.querySelectorAll('.answer')).at(-1)?.textContent ?? ''"))

    @property
    def idle(self) -> bool:
        return bool(self.script("return document.getElementById('stop').hidden"))

    def ask(self, prompt: str, wait: bool = True) -> None:
        self.one("prompt").send_keys(prompt, "\ue007")  # Enter
        if wait:
            asked = len(self.server.requests)
            self.wait(lambda: len(self.server.requests) > asked or not self.idle or self.answer)
            self.wait(lambda: self.idle)

    def at_step(self, step: int) -> bool:
        return self.text("#step-number").startswith(f"step {step + 1} of ")

    def compare(self) -> str:
        self.one("compare").click()
        self.wait(lambda: self.idle and self.one("verdict").text)
        return str(self.one("verdict").text)

    def no_complaints(self) -> bool:
        """Neither a script error nor a violation of the content security policy."""
        return [entry for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Page]]:
    with ExitStack() as stack:

        def opened(**options: Any) -> Page:
            server = Pretender(**options)
            return Page(chromium, server, stack.enter_context(running(server.app())))

        yield opened


def overlaps(page: Page) -> list[Any]:
    """Pairs of nodes that cover each other, and texts that do not fit into their nodes."""
    return list(
        page.script("""
        const groups = Array.from(document.querySelectorAll("#picture g")), found = [];
        const boxes = groups.map(group => group.querySelector(".pill").getBBox());
        boxes.forEach((one, place) => boxes.slice(0, place).forEach(other => {
          if (one.x < other.x + other.width && other.x < one.x + one.width
              && one.y < other.y + other.height && other.y < one.y + one.height) found.push(groups[place].textContent);
        }));
        groups.forEach((group, place) => {
          let end = boxes[place].x;
          for (const text of group.querySelectorAll("text")) {
            const { x, width } = text.getBBox();
            if (x < end || x + width > boxes[place].x + boxes[place].width) found.push(text.textContent);
            end = x + width;
          }
        });
        return found;
    """)
    )


@pytest.mark.browser
def test_an_answer_is_streamed_coloured_and_drawn(open_page: Callable[..., Page]) -> None:
    page = open_page(pause=0.03)
    for _ in range(30):  # by keyboard alone
        if page.focused == "prompt":
            break
        page.press("\ue004")  # Tab
    page.press(QUESTION, "\ue007")
    page.wait(lambda: 0 < len(page.answer) < len(SKY))
    assert page.one("stop").is_displayed() and page.focused == "prompt"
    page.wait(lambda: page.idle)
    assert page.answer == SKY

    tokens = [token for step in STEPS for token in step["tokens"]]
    shown = page.script("""return Array.from(document.querySelectorAll(".answer .token"),
        one => [one.textContent, one.dataset.source, Number(one.dataset.step), one.title])""")
    steps = [number for number, step in enumerate(STEPS) for _ in step["tokens"]]
    assert [each[:3] for each in shown] == [[t["text"], t["source"], s] for t, s in zip(tokens, steps, strict=True)]
    assert all(source in title for _, source, _, title in shown)
    looks = page.script("""return Array.from(document.querySelectorAll(".legend .ink"), one => getComputedStyle(one))
        .map(style => [style.backgroundColor, style.textDecorationLine + style.textDecorationStyle])""")
    assert all(len(set(look)) == len(SOURCES) for look in zip(*looks, strict=True)), "colours differ, and so do lines"
    counts = page.script("return Array.from(document.querySelectorAll('.legend b'), one => Number(one.textContent))")
    assert sum(counts) == len(tokens)

    request = page.server.requests[0]
    assert request["messages"] == [{"role": "user", "content": QUESTION}] and request["stream"] is True
    assert request["draftgraph"] == {"mode": "auto", "trace": True} and isinstance(request["seed"], int)
    assert page.text("#status") == SKY, "told once, when it is whole"
    assert page.text("#model").startswith("SmolLM2-135M-Instruct")
    assert float(page.script("return document.querySelector('#figures dd').firstChild.data")) > 0
    assert page.no_complaints()


@pytest.mark.browser
def test_every_step_can_be_looked_at(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.ask(QUESTION)
    page.wait(lambda: page.at_step(len(STEPS) - 1))
    page.script("document.getElementById('slider').focus()")
    page.press("\ue011")  # Home
    for number, step in enumerate(STEPS):
        page.wait(lambda number=number: page.at_step(number))
        drawn, sent = page.all("#picture .node"), step["step"]["nodes"]
        assert len(drawn) == len(sent) <= VERIFIED
        names = page.script(
            "return Array.from(document.querySelectorAll('#picture .node .token'), one => one.textContent)"
        )
        assert names == [label(node["text"], node["token"]) for node in sent]
        assert len(page.all("#picture .node.accepted")) == sum(node["accepted"] for node in sent) - 1  # the root apart
        assert len(page.all("#picture .link")) == len(step["step"]["merges"])
        assert len(page.all("#picture g.bonus")) == (step["tokens"][-1]["source"] == "target")
        assert page.script("return Array.from(document.querySelectorAll('.token.now'), one => one.textContent)") == [
            token["text"] for token in step["tokens"]
        ]
        assert overlaps(page) == []
        page.press("\ue014")  # right arrow
    assert any(len(step["step"]["nodes"]) == VERIFIED and step["step"]["merges"] for step in STEPS)

    page.all(".answer .token")[0].click()
    page.wait(lambda: page.at_step(0))
    page.one("next").click()
    page.wait(lambda: page.at_step(1))
    page.script("document.activeElement.blur()")
    page.press("\ue014")
    page.wait(lambda: page.at_step(2))
    page.press("\ue012", "\ue012", "\ue012")  # left arrow
    page.wait(lambda: page.at_step(0))
    assert page.no_complaints()


@pytest.mark.browser
def test_plain_decoding_gives_the_same_text_more_slowly(open_page: Callable[..., Page]) -> None:
    page = open_page(pause=0.01)
    page.script("document.querySelector('[name=temperature]').value = '0.7'")
    page.ask(QUESTION)
    verdict = page.compare()
    assert "identical text" in verdict and float(verdict.split("×")[0]) > 1.5
    drafted, plain = page.server.requests
    assert plain["draftgraph"] == {"mode": "off", "trace": True}
    for name in ("messages", "seed", "temperature", "max_tokens"):
        assert plain[name] == drafted[name]
    assert page.text("#plain-answer .prose") == SKY and len(page.all("#race .runner")) == 2

    page.one("always-compare").click()
    page.one("prompt").send_keys("differ", "\ue007")
    page.wait(lambda: "differ from character 21 on" in page.one("verdict").text)
    assert len(page.server.requests) == 4
    page.all(".answer .token")[0].click()  # of the first answer
    assert "identical text" in page.one("verdict").text and page.at_step(0)
    assert page.no_complaints()


@pytest.mark.browser
def test_a_stopped_answer_is_kept_and_can_be_compared(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.ask("slow", wait=False)
    page.wait(lambda: page.answer)
    page.press("\ue00c")  # Escape
    page.wait(lambda: page.idle)
    kept = page.answer
    assert kept and ANSWERS["slow"].startswith(kept) and "stopped" in page.text(".note")
    page.wait(lambda: page.server.disconnected == ["slow"])
    assert "identical text" in page.compare()
    assert page.server.requests[-1]["max_tokens"] == len(page.all(".answer .token"))

    page.ask("slow", wait=False)
    page.wait(lambda: not page.idle)
    page.one("stop").click()
    page.wait(lambda: page.idle)
    assert page.server.requests[-1]["messages"][1] == {"role": "assistant", "content": kept}
    page.ask("slow", wait=False)
    page.wait(lambda: not page.idle)
    page.one("new-chat").click()
    page.wait(lambda: page.idle)
    assert page.all(".message") == [] and page.one("welcome").is_displayed() and page.focused == "prompt"
    page.ask("Anew")
    assert page.server.requests[-1]["messages"] == [{"role": "user", "content": "Anew"}]
    assert page.answer == "You said: Anew" and page.no_complaints()


@pytest.mark.browser
def test_errors_are_told_in_one_line(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.ask("break")
    assert page.one("error").text == "The engine stopped; it starts again."
    assert ANSWERS["break"].startswith(page.answer) and "broken off" in page.text(".note")
    assert not page.one("compare").is_enabled()
    page.ask("refuse")
    assert page.one("error").text == "The queue is full. So it is. Try again in 3 s."
    assert page.one("prompt").get_attribute("value") == "refuse" and len(page.all(".message")) == 2
    page.one("prompt").clear()
    page.ask("markup")
    assert not page.one("error").is_displayed() and page.answer == ANSWERS["markup"]
    assert page.browser.title == "draftgraph playground" and page.all(".answer b, .answer script") == []
    page.script("document.querySelector('[name=temperature]').value = '9'")
    page.ask("Too hot", wait=False)
    assert page.focused == "temperature" and page.one("settings").is_displayed() and len(page.server.requests) == 3
    assert [entry for entry in page.browser.get_log("browser") if "429" not in entry["message"]] == []


@pytest.mark.browser
def test_switches_follow_the_mode(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.one("settings-toggle").click()
    fields = {
        name: page.browser.find_element("name", name) for name in ("k", "tau", "theta_prob", "theta_sib", "max_nodes")
    }
    for mode, used in modes().items():
        page.script("document.querySelector(`[name=mode][value=${arguments[0]}]`).click()", mode)
        assert {name for name, input in fields.items() if input.is_enabled()} == set(used)
        for name, switch in used.items():
            assert float(fields[name].get_attribute("placeholder")) == switch["default"]
    page.script("document.querySelector('[name=mode][value=tree]').click()")
    fields["k"].send_keys("3")
    fields["theta_prob"].send_keys("0.15")
    page.browser.find_element("name", "seed").send_keys("7")
    page.ask("Hello")
    request = page.server.requests[0]
    assert request["draftgraph"] == {"mode": "tree", "trace": True, "k": 3, "theta_prob": 0.15} and request["seed"] == 7
    page.script("document.querySelector('[name=mode][value=off]').click()")
    page.ask("half")
    assert page.server.requests[1]["draftgraph"] == {"mode": "off", "trace": True}
    assert page.answer == ANSWERS["half"] and not page.one("compare").is_enabled()
    assert len(page.all("#picture .node")) == 1 and page.at_step(len(list(plain_steps(ANSWERS["half"]))) - 1)
    assert page.no_complaints()


@pytest.mark.browser
def test_a_key_is_asked_for_and_kept_for_this_tab_only(open_page: Callable[..., Page]) -> None:
    page = open_page(key="secret")
    assert "API key" in page.one("error").text and page.one("settings").is_displayed()
    page.browser.find_element("name", "key").send_keys("secret", "\ue004")
    page.wait(lambda: page.text("#model"))
    page.ask("Hello")
    assert page.answer == "You said: Hello" and not page.one("error").is_displayed()
    assert page.script("return Object.values(sessionStorage)") == ["secret"]
    assert page.script("return localStorage.length + document.cookie.length") == 0


@pytest.mark.browser
def test_everything_is_reached_by_tab_and_left_again(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.one("settings-toggle").click()
    page.ask(QUESTION)
    page.script("document.activeElement.blur(); document.getElementById('new-chat').focus()")
    visited: list[str] = []
    while page.focused not in visited and len(visited) < 60:
        visited.append(page.focused)
        style = "const style = getComputedStyle(document.activeElement);"
        seen = page.script(f"{style} return style.outlineStyle !== 'none' || style.opacity === '0'")  # or its label's
        assert seen or page.focused in ("new-chat", "BODY"), page.focused
        page.press("\ue004")
    switches = {"temperature", "seed", "max_tokens", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "key", "mode"}
    places = {"conversation", "settings-toggle", "prompt", "send", "previous", "slider", "picture", "always-compare"}
    assert switches | places | {"compare", "new-chat"} <= set(visited)
    unnamed = page.script("""return Array.from(document.querySelectorAll("button, input, textarea, [tabindex='0']"))
        .filter(one => !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length))
        .map(one => one.outerHTML)""")
    assert unnamed == [] and page.no_complaints()


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")])
def test_it_fits_a_phone_in_light_and_dark(
    open_page: Callable[..., Page], chromium: Any, scheme: str, ground: str
) -> None:
    preferred = [{"name": "prefers-color-scheme", "value": scheme}]
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preferred})
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    page = open_page()
    width = "return document.documentElement.scrollWidth"
    assert page.script(width) == 360
    page.ask(QUESTION)
    page.compare()
    page.one("settings-toggle").click()
    assert page.script(width) == 360
    page.ask("x" * 300)
    assert page.script(width) == 360
    assert page.script("return getComputedStyle(document.body).backgroundColor") == ground
    for other in (320, 360, 960, 970, 1024):
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone | {"width": other, "mobile": False})
        beyond = page.script("""return Array.from(document.querySelectorAll("button, input, textarea, h1, h2, dd, li"))
            .filter(one => one.checkVisibility())
            .filter(one => {
              const [box, frame] = [one, one.closest("header, .chat, .card")].map(each => each.getBoundingClientRect());
              return box.left < frame.left || box.right > frame.right;
            }).map(one => one.outerHTML)""")
        assert beyond == [] and page.script(width) <= other
    assert page.no_complaints()
