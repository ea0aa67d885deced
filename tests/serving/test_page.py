"""The page at ``/``, in a browser: what it shows, what it loads, and that it can be used without a mouse."""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from headless_browser import MOST_SECONDS, PROGRAM, Tab, browser
from starlette.testclient import TestClient

import specctl
from specctl.decoding.session import Session
from specctl.records import Completion, Round
from specctl.serving.endpoints import application
from specctl.serving.listening import address_of, bound
from specctl.serving.served import Served
from specctl.serving.service import Service
from tests.support.onnx_models import needs_onnx

in_a_browser = [
    pytest.mark.slow,
    needs_onnx,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on this machine"),
]
ANSWERED = "last !== null && !running"
SPANS = "[...document.querySelectorAll('.text')].map((one) => [...one.querySelectorAll('span')])"
CONTRAST = """(() => {
  const shade = (colour) => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((one) => one / 255);
    const [r, g, b] = parts.map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = shade(getComputedStyle(document.body).backgroundColor);
  const against = (one) => {
    const ink = shade(getComputedStyle(one).color);
    return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
  };
  return Math.min(...[...document.body.querySelectorAll('*')].map(against));
})()"""
"""The least contrast of any text with the page, as WCAG 2 defines it."""


@contextmanager
def served(decoder: specctl.Decoder, key: str | None = None) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    service = Service(Served.here(decoder.pair, decoder.profile, "toy <b>pair</b>"))
    config = uvicorn.Config(application(service, key=key), log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    with bound("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield address_of(listening)
        finally:
            server.should_exit = True
            thread.join()
            service.thread.join(30)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


def chosen(tab: Tab, name: str, value: str) -> None:
    tab.run(f"$('{name}').value = '{value}'; $('{name}').dispatchEvent(new Event('change')); 0")


def unnamed(tab: Tab) -> list[Any]:
    """What can have the focus and has no name that a screen reader could say."""
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
        focusable = any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ()))
        if focusable and not node["ignored"] and not node.get("name", {}).get("value"):
            found.append((node["role"]["value"], node.get("properties")))
    return found


class TestPage:
    pytestmark = in_a_browser

    def test_a_conversation(self, tab: Tab, decoder: specctl.Decoder) -> None:
        with served(decoder) as url:
            tab.open(f"{url}/")
            tab.until("offered !== null")
            assert tab.run("document.activeElement.id") == "question"
            tab.run("$('chat').checked = false; $('tokens').value = 40; 0")
            tab.write("the <i>th</i>")
            tab.press("Enter")
            tab.until(ANSWERED)
            text = decoder.generate("the <i>th</i>", max_new_tokens=40).text
            assert tab.run("document.querySelector('.text').textContent") == text
            assert tab.run("$('announced').textContent") == text
            assert tab.run("document.querySelector('h2').textContent") == "the <i>th</i>"
            assert tab.run("document.querySelectorAll('i, b').length") == 0
            origins = set(tab.run(f"{SPANS}[0].map((one) => one.className)"))
            assert len(origins) > 1
            assert origins <= {"accepted", "corrected", "bonus"}
            assert tab.run(f"{SPANS}[0].every((one) => one.title.startsWith(one.className))")
            assert tab.run("document.querySelectorAll('.rounds li').length") > 1
            tab.run("$('compare').focus(); 0")
            tab.press("Enter")
            tab.until("document.querySelector('.verdict')")
            assert tab.run("document.querySelector('.verdict').textContent").startswith("The texts are equal")
            assert tab.run("document.querySelectorAll('.columns > section').length") == 2
            assert tab.run(
                "[...document.querySelectorAll('.figures')].every((one) => one.textContent.includes('tokens/s'))"
            )

            chosen(tab, "policy", "svip")
            assert float(tab.run("$('setting-threshold').value")) == 0.3
            tab.run("$('setting-threshold').value = 0.8; $('question').focus(); 0")
            tab.write("of the")
            tab.press("Enter")
            tab.until("document.querySelectorAll('article').length === 2 && !running && messages.length === 4")
            assert "threshold=0.8" in tab.run("document.querySelectorAll('h3')[2].textContent")
            tab.run("$('setting-threshold').value = -1; $('question').focus(); 0")
            tab.write("of the")
            tab.press("Enter")
            assert tab.run("document.querySelectorAll('article').length") == 2, "the browser says what is wrong"
            assert tab.run("$('asking').checkValidity()") is False

            assert unnamed(tab) == []
            for scheme in ("dark", "light"):
                tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                assert tab.run(CONTRAST) >= 4.5
            tab.call("Emulation.setDeviceMetricsOverride", width=320, height=640, deviceScaleFactor=1, mobile=True)
            wide = "[...document.querySelectorAll('*')].filter((one) => one.getBoundingClientRect().right > 320)"
            assert tab.run(f"{wide}.map((one) => one.outerHTML)") == []
            tab.call("Emulation.clearDeviceMetricsOverride")
            assert tab.complaints == []
            assert {address.rsplit("/", 1)[0].removesuffix("/v1") for address in tab.loaded} == {url}

    def test_a_text_is_stopped(self, tab: Tab, decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        play, stopped = Session.play, threading.Event()

        def waits(session: Session, *asked: Any) -> Generator[Round, bool | None, Completion]:
            playing = play(session, *asked)
            yield next(playing)
            yield next(playing)
            stopped.wait(MOST_SECONDS)
            return (yield from playing)

        monkeypatch.setattr(Session, "play", waits)
        with served(decoder) as url:
            tab.open(f"{url}/")
            tab.until("offered !== null")
            tab.run("$('chat').checked = false; 0")
            tab.write("the th")
            tab.press("Enter")
            tab.until("document.querySelectorAll('.rounds li').length === 2")
            tab.press("Escape")
            tab.until(ANSWERED)
            stopped.set()
            assert tab.run("document.querySelector('.figures').textContent").endswith("stopped")
            assert tab.run("messages[1].content") == tab.run("document.querySelector('.text').textContent")

    def test_a_key_is_asked_for(self, tab: Tab, decoder: specctl.Decoder) -> None:
        with served(decoder, key="sesame") as url:
            tab.open(f"{url}/")
            tab.until("!$('wrong').hidden")
            assert tab.run("$('wrong').textContent") == "the API key is missing or wrong"
            assert tab.run("document.activeElement.id") == "key"
            tab.write("sesame")
            tab.press("Enter")
            tab.until("offered !== null")
            assert tab.run("[$('locked').hidden, $('wrong').hidden, $('key').value]") == [True, True, ""]
            assert tab.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@needs_onnx
def test_what_the_page_is_told(decoder: specctl.Decoder) -> None:
    service = Service(Served.here(decoder.pair, decoder.profile, "toy"))
    client = TestClient(application(service, key="sesame"))
    for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
        answer = client.get(path)
        assert (answer.status_code, kind in answer.headers["content-type"]) == (200, True)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert client.get("/v1/specctl").status_code == 401
    told = client.get("/v1/specctl", headers={"Authorization": "Bearer sesame"}).json()
    assert told["policy"] == {"id": "constant", "label": "constant:draft_length=3"}
    policies = {one["id"]: one["settings"] for one in told["policies"]}
    assert policies["svip"]["threshold"].items() >= {"minimum": 0, "default": 0.3}.items()
    assert not policies.keys() & {"none", "specdec++", "disco", "confidence"}, "its draft has no such head"


def test_the_page_needs_no_one_else() -> None:
    folder = Path(specctl.__file__).parent / "serving" / "page"
    script = (folder / "page.js").read_text(encoding="utf-8")
    assert not any(word in script for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "Storage"))
    assert not any("//" in path.read_text(encoding="utf-8").replace("// ", "") for path in folder.iterdir())
