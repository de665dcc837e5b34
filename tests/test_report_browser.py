"""The report in a real browser: light and dark, by keyboard and pointer, live, and under attack.

Needs Chromium and its driver on PATH (Debian: chromium, chromium-driver); without them these tests are skipped.
"""

import base64
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plora_jax.report.write import write_report
from tests.made_run import make_run
from tests.test_report import hostile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    webdriver = None  # type: ignore[assignment]
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and webdriver),
    reason="no browser: needs chromium and chromedriver on PATH, and selenium",
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-default-apps --disable-dev-shm-usage --window-size=1280,900"
)
ROOT = Path(__file__).parent.parent


DATA = "return JSON.parse(document.getElementById('data').textContent).jobs"
LEFT = """return [...document.querySelectorAll('#board .jobs tr:not(.off)')].map((row) => Number(row.dataset.j))"""
CONTRAST = """
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((x) => x / 255)
            .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const paper = light(getComputedStyle(document.body).backgroundColor), out = [];
    const texts = "h1, h2, p, dt, dd, th, td, figcaption, .tick, .end, .status, .lane, a";
    for (const element of document.querySelectorAll(texts)) {
        if (!element.textContent.trim()) continue;
        const style = getComputedStyle(element), svg = element instanceof SVGElement;
        const ink = light(svg ? style.fill : style.color);
        out.push([Math.max(ink, paper) / Math.min(ink, paper), String(element.textContent)]);
    }
    return out.sort((a, b) => a[0] - b[0])[0];"""  # WCAG 2: the least contrast of a text with the paper
COLUMN = """
    const cells = [...document.querySelectorAll("#board thead th")].map((cell) => cell.textContent);
    const at = cells.indexOf(arguments[0]);
    return [...document.querySelectorAll("#board .jobs tr")].map((row) => row.cells[at].textContent);"""
POINT = """
    const svg = document.querySelector("svg.curves"), line = svg.querySelector(".line.best");
    svg.scrollIntoView({block: "center"});
    const end = line.getPointAtLength(line.getTotalLength() * 0.9);
    const at = new DOMPoint(end.x, end.y).matrixTransform(svg.getScreenCTM());
    return [Math.round(at.x), Math.round(at.y)];"""
HOVER = """
    const at = {bubbles: true, clientX: 5, clientY: 5};
    const bars = document.querySelectorAll(".lanes [data-j]");
    bars.forEach((bar) => bar.dispatchEvent(new PointerEvent("pointerover", at)));"""
INJECT = """
    const made = document.createElement("div"), script = document.createElement("script");
    made.innerHTML = "<img src=x onerror='window.hit=1'>";
    script.textContent = "window.hit = 2";
    document.body.append(made, script);"""


class Browser:
    """Drive one Chromium and know what it said and asked for."""

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in [*FLAGS.split(), f"--user-data-dir={folder}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        self.driver.execute_cdp_cmd("Network.enable", {})

    def open(self, where: str, theme: str = "light", wide: int = 1280) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        size = {"width": wide, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.said()
        self.asked()
        self.driver.get(where)

    def said(self) -> list[str]:
        """Return what the console said since the last question: errors, warnings, refusals of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked(self) -> list[str]:
        """Return the addresses asked for since the last question."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def pixels(self) -> list[bytes]:
        """Return what is on the screen at a quarter of its size, a row of RGB bytes a line."""
        clip = {"x": 0, "y": 0, "width": self.run("return innerWidth"), "height": 900, "scale": 0.25}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
        return _rows(base64.b64decode(shot["data"]))


def _rows(png: bytes) -> list[bytes]:
    at, width, channels, data = 8, 0, 3, b""
    while at < len(png):
        (size,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, _, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8 and colour in (2, 6)
            channels = 3 if colour == 2 else 4
        data += body if kind == b"IDAT" else b""
        at += 12 + size
    raw, step = zlib.decompress(data), channels
    rows, before = [], bytearray(width * step)
    for start in range(0, len(raw), 1 + width * step):
        how, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * step])
        for i in range(len(line)):
            a, b = line[i - step] if i >= step else 0, before[i]
            c = before[i - step] if i >= step else 0
            p = a + b - c
            paeth = (
                a
                if abs(p - a) <= abs(p - b) and abs(p - a) <= abs(p - c)
                else b
                if abs(p - b) <= abs(p - c)
                else c
            )
            line[i] = (line[i] + (0, a, b, (a + b) // 2, paeth)[how]) & 255
        before = line
        rows.append(b"".join(bytes(line[i : i + 3]) for i in range(0, len(line), step)))
    return rows


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make_run(tmp_path_factory.mktemp("browser") / "run", count=40, steps=60)
    return write_report(run).as_uri()


@pytest.mark.parametrize(("theme", "wide"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_it_shows_itself_in_light_and_dark_wide_and_narrow(
    browser: Browser, page: str, theme: str, wide: int
) -> None:
    browser.open(page, theme, wide)
    assert browser.said() == [] and browser.asked() == [page]
    rows = browser.pixels()
    colours = {row[i : i + 3] for row in rows for i in range(0, len(row), 3)}
    assert len(colours) > 40, "the screen is almost empty"
    corner = rows[-1][:3]
    assert (min(corner) > 240) if theme == "light" else (max(corner) < 40)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    contrast = browser.run(CONTRAST)
    assert contrast[0] >= 4.5, f"text that is hard to read: {contrast}"
    if wide == 1280 and theme == "light":
        browser.find("#theme")[0].click()
        assert max(browser.pixels()[-1][:3]) < 40 and browser.find("#theme")[0].text == "Light"
        browser.find("#theme")[0].click()
        assert min(browser.pixels()[-1][:3]) > 240
        browser.run("localStorage.clear()")


def column(browser: Browser, name: str) -> list[str]:
    return list(browser.run(COLUMN, name))


def test_the_leaderboard_is_sorted_by_keyboard(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.press(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    for _ in range(40):
        browser.press(Keys.TAB)
        if browser.run("return document.activeElement.closest('th')?.textContent") == "loss":
            break
    else:
        pytest.fail("the header was not reached by Tab")
    sort = "return document.activeElement.closest('th').getAttribute('aria-sort')"
    for key, want in ((Keys.ENTER, "ascending"), (Keys.SPACE, "descending"), (Keys.ENTER, "ascending")):
        browser.press(key)
        assert browser.run(sort) == want
        losses = column(browser, "loss")
        numbers = [float(text) for text in losses if text != "–"]
        assert numbers == sorted(numbers, reverse=want == "descending") and len(set(numbers)) > 5
        assert "–" not in losses[: len(numbers)]  # failed jobs stay last, whichever way
    for name in ("lr", "alpha"):
        browser.run(
            "[...document.querySelectorAll('th button')].find((b) => b.textContent === arguments[0]).click()",
            name,
        )
        values = [float(text) for text in column(browser, name)]
        assert values == sorted(values) and len(set(values)) > 5
    browser.run("document.querySelector('#board .jobs tr').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert (
        browser.run("return document.activeElement.rowIndex - document.querySelector('.jobs tr').rowIndex")
        == 2
    )
    chosen = browser.run("return document.activeElement.dataset.j")
    browser.press(Keys.ENTER)
    assert browser.run(
        "return [...new Set([...document.querySelectorAll('.pin')].map((e) => e.dataset.j))]"
    ) == [chosen]
    assert len(browser.find(".line.pin")) >= 2  # in the curves as in the coordinates
    browser.press(Keys.ESCAPE)
    assert not browser.find(".pin") and browser.said() == []


def test_few_rows_at_first_and_all_on_demand(browser: Browser, page: str) -> None:
    browser.open(page)
    shown = (
        "return [...document.querySelectorAll('#board .jobs tr')].filter((row) => row.offsetHeight).length"
    )
    assert browser.run(shown) == 25
    browser.find("#more")[0].click()
    assert browser.run(shown) == 40 and browser.find("#more")[0].text == "Show the first 25"


def test_axes_are_brushed_by_pointer_and_by_keys(browser: Browser, page: str) -> None:
    browser.open(page)
    data = browser.run(DATA)
    grab = browser.find(".axis[data-name=rank] .grab")[0]
    browser.run("arguments[0].scrollIntoView({block: 'center'})", grab)
    height = grab.size["height"]
    chain = webdriver.ActionChains(browser.driver)
    chain.move_to_element_with_offset(grab, 0, int(-height / 2 + 6)).click_and_hold()
    chain.move_by_offset(0, int(height * 0.16)).release().perform()  # the upper fifth: the largest rank
    want = [at for at, job in enumerate(data) if job["fields"]["rank"] == "128"]
    assert sorted(browser.run(LEFT)) == want and 0 < len(want) < 40
    assert f"{len(want)} of 40 jobs" in browser.find("#shown")[0].text
    assert browser.run("return document.querySelectorAll('.parallel .line:not(.off)').length") == len(want)
    assert browser.find("#clear")[0].is_displayed()
    browser.find("#clear")[0].click()
    assert len(browser.run(LEFT)) == 40
    lower = browser.find(".axis:last-of-type .handle")[1]
    assert lower.get_attribute("role") == "slider"
    browser.run("arguments[0].focus()", lower)
    browser.press(*[Keys.ARROW_UP] * 8)
    kept = browser.run(LEFT)
    scores = [data[at]["score"] for at in kept]
    gone = [job["score"] for at, job in enumerate(data) if at not in kept and job["score"] is not None]
    assert 0 < len(kept) < 40 and min(scores) > max(gone)
    assert 0 < int(lower.get_attribute("aria-valuenow")) < 100
    browser.press(Keys.ESCAPE)
    assert len(browser.run(LEFT)) == 40 and browser.said() == []


def test_a_line_tells_its_job(browser: Browser, page: str) -> None:
    browser.open(page)
    spot = browser.run(POINT)
    move = {"type": "mouseMoved", "x": spot[0], "y": spot[1]}
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", move)
    time.sleep(0.2)
    tip = browser.find("#tip")[0]
    told = next(job for job in browser.run(DATA) if tip.text.startswith(job["id"]))
    assert f"score {told['score']:.3f}" in tip.text and f"rank {told['fields']['rank']}" in tip.text
    assert browser.find(".line.hot")


def test_without_scripts_everything_is_there(browser: Browser, page: str) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(page)
        text = browser.find("body")[0].text
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    rows = browser.find("#board .jobs tr")
    assert len(rows) == 40 and all(row.is_displayed() for row in rows)
    assert not browser.find("#board button") and not browser.find("#theme")[0].is_displayed()
    assert "Drag along an axis" not in text and "PeftModel.from_pretrained" in text
    assert all(svg.size["height"] > 8 for svg in browser.find("figure svg"))


def test_a_hostile_run_scripts_nothing(browser: Browser, tmp_path: Path) -> None:
    path = write_report(hostile(tmp_path / "run"))
    browser.open(path.as_uri())
    assert browser.said() == [] and browser.asked() == [path.as_uri()]
    assert (
        browser.run("return document.querySelectorAll('img, script:not([id=data]), iframe, object').length")
        == 1
    )
    row = browser.find("#board .jobs tr")[0]
    browser.run("arguments[0].focus()", row)
    browser.press(Keys.ENTER, Keys.ARROW_DOWN)
    for button in browser.find("#board thead button"):
        browser.run("arguments[0].click()", button)
    browser.run(HOVER)
    assert browser.run("return document.getElementById('tip').textContent.includes('<img src=x onerror')")
    assert not browser.find("img") and browser.said() == []
    # an injected script would be refused as well: the policy stands even if escaping failed
    browser.run(INJECT)
    time.sleep(0.3)
    assert browser.run("return window.hit") is None and any(
        "Content Security Policy" in text for text in browser.said()
    )
    assert not [url for url in browser.asked() if not url.startswith(("file:", "data:"))]


def test_the_served_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", count=30, steps=40, until=500.0)
    command = [sys.executable, "-m", "plora_jax", "report", str(run), "--serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout
        address = re.findall(r"http://\S+", process.stdout.readline())[0]
        try:
            browser.open(address)
            assert browser.find(".state")[0].text == "running"
            browser.run("document.querySelectorAll('#board thead button')[1].click()")  # by name
            names = column(browser, "job")
            assert names == sorted(names)
            chosen = browser.run(
                "const row = document.querySelector('#board .jobs tr'); row.click(); return row.cells[1].textContent"
            )
            whole = make_run(tmp_path / "whole", count=30, steps=40)
            for name in ("leaderboard.json", "journal.jsonl", "events.jsonl"):
                shutil.copy(whole / name, run / name)
            shutil.copytree(whole / "jobs", run / "jobs", dirs_exist_ok=True)
            until = time.monotonic() + 20
            while browser.find(".state")[0].text != "finished" and time.monotonic() < until:
                time.sleep(0.2)
            assert browser.find(".state")[0].text == "finished"
            names = column(browser, "job")
            assert names == sorted(names) and len(names) == 30  # sorted and chosen as before
            assert (
                browser.run("return document.querySelector('#board tr.pin').cells[1].textContent") == chosen
            )
            assert browser.said() == []
            assert {url.split("?")[0] for url in browser.asked()} == {address, address + "state.json"}
        finally:
            process.terminate()
