"""The page in a real browser: workers, failures, access and accessibility."""

import contextlib
import http.server
import pathlib
import shutil
import threading
import time

import numpy as np
import pytest
from helpers import children, sessions, shared

from agn_optax import errors, service
from agn_optax.center import Answer, Submission
from agn_optax.service import Access

pytestmark = pytest.mark.slow

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")

RULE = shared.downpour()
START, ONES = np.zeros(3, np.float32), np.full(3, 0.01, np.float32)
LOOKS, WORKS = "observer-0123456789", "worker-0123456789"
TOKENS = f"observer * {LOOKS}\nchief,worker * {WORKS}".encode()
NOTHING = "\u2013"  # stands for a missing number
EVIL = "<script>document.title = 'evil'</script><img src=x onerror=alert(1)>"
LIMIT = 60  # s, generous: no test should come near it
_FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    *("disable-dev-shm-usage", "lang=en-US", "window-size=1280,900"),
    "host-resolver-rules=MAP evil.example 127.0.0.1",
)


@pytest.fixture
def browser(tmp_path):
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in _FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield made
    finally:
        made.quit()


def until(condition, limit=LIMIT):
    """Wait for a condition with few checks: each is a call of the browser."""
    end = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.1)
    return found


class BrowserPage:
    """The page as a user sees it."""

    def __init__(self, browser):
        self._browser = browser

    def run(self, script, *arguments):
        return self._browser.execute_script(script, *arguments)

    def find(self, selector):
        return self._browser.find_element("css selector", selector)

    def text(self, selector):
        return self.run(
            "return document.querySelector(arguments[0]).innerText", selector
        )

    def row(self, name):
        """Return a worker's cells by their column titles; {} if it has no row."""
        return self.run(
            "const heads = [...document.querySelectorAll('#columns th')];"
            "const row = [...document.querySelectorAll('#rows tr')]"
            "  .find(row => row.cells[0].textContent === arguments[0]);"
            "return row ? Object.fromEntries(heads.map((head, i) =>"
            "  [head.textContent, row.cells[i].textContent])) : {}",
            name,
        )

    def names(self, selector):
        """Return the accessible names of the elements."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])]"
            "  .map(each => each.getAttribute('aria-label'))",
            selector,
        )

    def overflows(self, width):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        self._browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        return self.run("return document.documentElement.scrollWidth > innerWidth")

    def ground(self, scheme):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        return self.run("return getComputedStyle(document.body).backgroundColor")

    def complaints(self):
        """Return the browser's log messages, except failed requests."""
        log = self._browser.get_log("browser")
        return [each["message"] for each in log if each["source"] != "network"]


@contextlib.contextmanager
def training(address, name):
    """Run a worker in a thread, over a socket, that reports a falling loss."""

    def train():
        with (
            contextlib.suppress(errors.CenterError),  # of a center that has ended
            service.connect(
                address, RULE, token=WORKS, transports=["socket"]
            ) as center,
        ):
            session, version, number = center.join(name), 0, 0
            while not ended.wait(0.05):
                number += 1
                fields = {"steps": 5, "reported": {"loss": 2.0 / number, EVIL: number}}
                answer = session.exchange(
                    Submission(number, ONES, anchor_version=version, **fields)
                )
                version = answer.version

    ended = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LIMIT)


def test_page_shows_workers_a_kill_and_a_restart(browser, monkeypatch):
    monkeypatch.setenv("AGN_OPTAX_TOKEN", WORKS)  # of the process
    program = pathlib.Path(__file__).with_name("durable_worker.py")
    # A lost connection is noticed by the monitor, which looks once a second.
    settings = {
        "security": service.Security(access=Access(TOKENS)),
        "limits": service.Limits(lease=3.0),
    }
    shown = BrowserPage(browser)
    with (
        children.processes(program, 1) as (process,),
        contextlib.ExitStack() as stack,
    ):
        server = service.serve(RULE, START, page="127.0.0.1:0", **settings)
        stack.callback(server.stop)
        where = server.page_address
        process.send(
            do="start", address=server.address, names=["worker-1"], elements=[0]
        )
        browser.get(where)

        # Without a token nothing is shown; a wrong one is not stored.
        until(lambda: shown.find("#token").is_displayed())
        assert not shown.find("#shown").is_displayed()
        shown.find("#token").send_keys("wrong-0123456789\n")
        until(lambda: "does not know that token" in shown.text("#why"))
        shown.find("#token").send_keys(LOOKS + "\n")
        until(lambda: shown.find("#shown").is_displayed())
        assert browser.current_url == where
        assert shown.text("#title") == f"downpour at {server.address}"

        # Workers join; markup in their names is shown as text.
        stack.enter_context(training(server.address, EVIL))
        process.answer()
        until(lambda: "connected" in shown.row("worker-1").get("state", ""))
        until(lambda: shown.row(EVIL).get("loss", NOTHING) not in ("", NOTHING))
        row = shown.row(EVIL)
        assert (row["transport"], row["period"]) == ("socket, lo", "5")
        until(lambda: shown.row("worker-1")["exchanges/s"] not in (NOTHING, "0"))
        assert "evil" not in browser.title
        assert not shown.run("return document.querySelectorAll('main img').length")
        assert f"{EVIL} joined, by socket" in shown.text("#events")

        # The process of a worker is killed.
        process.kill()
        until(lambda: "lease expired" in shown.row("worker-1")["state"])
        until(lambda: "worker-1 lost its connection" in shown.text("#events"))
        assert "worker-1 did not return" in shown.text("#events")
        received = shown.run("return document.getElementById('live').textContent")
        assert "its lease expired" in received

        # The page works by keyboard, with a screen reader, and on a phone.
        charts = shown.names("#shown figure svg")
        assert len(charts) == 5
        assert charts[0].startswith("Exchanges a second: ")
        assert "updates behind" in charts[2]
        assert all("now, between" in charts[i] for i in (0, 1, 3))
        sparks = shown.names("td svg")
        assert "loss: nothing yet" in sparks  # that worker reports none
        assert any(name.startswith("loss from ") for name in sparks)
        chart = shown.find("#charts figure svg")
        shown.run("arguments[0].focus()", chart)
        chart.send_keys(webdriver.Keys.ARROW_LEFT)
        assert shown.text("#charts figure output").startswith("at ")
        assert not any(shown.overflows(width) for width in (320, 800, 1250, 2560))
        assert shown.ground("light") != shown.ground("dark")

        # The center stops, and another one starts with the same page.
        server.stop()
        until(lambda: "has not answered since" in shown.text("#banner"))
        assert shown.find("#shown").is_displayed()
        here = where.removeprefix("http://").strip("/")
        again = service.serve(RULE, START, page=here, **settings)
        stack.callback(again.stop)
        until(lambda: not shown.text("#banner"))
        assert shown.text("#title") == f"downpour at {again.address}"
        assert not shown.complaints()


class _OtherSite(http.server.BaseHTTPRequestHandler):
    """A site whose name resolves to this machine, for DNS rebinding."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<title>elsewhere</title>")

    def log_message(self, *args):
        pass


# Request smuggling: the body begins a request that the next one completes.
ATTACK = """
const done = arguments[0], received = [];
const body = "GET /state.json HTTP/1.1\\r\\nHost: localhost\\r\\nX: ";
const request = async (path, more) => {
  try {
    const answer = await fetch(path, {cache: "no-store", ...more});
    received.push(answer.status + " " + await answer.text());
  } catch (error) { received.push(String(error)); }
};
(async () => {
  for (let i = 0; i < 5; i++) {
    await request("/", {method: "POST", body});
    await request("/state.json");
  }
  done(received);
})();
"""


def test_page_of_another_origin_cannot_read_an_open_center(browser):
    """The name resolves first to the other site, then to the center's machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OtherSite) as site:
        port = site.server_address[1]
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            browser.get(f"http://evil.example:{port}/")
        finally:
            site.shutdown()
            thread.join(LIMIT)
    assert browser.title == "elsewhere"
    with service.serve(RULE, START, page=f"127.0.0.1:{port}"):
        browser.set_script_timeout(LIMIT)
        received = browser.execute_async_script(ATTACK)
        assert len(received) == 10
        assert not [text for text in received if "downpour" in text]
        assert any(text.startswith("421 ") for text in received)
        browser.get(f"http://localhost:{port}/")
        until(lambda: BrowserPage(browser).text("#title").startswith("downpour at "))


def bars(shown):
    """Return range and count of each bar of the staleness, and its width."""
    script = (
        "const chart = charts[2];"
        "return chart.bins.map(bin => [bin.from, bin.to, bin.count])"
    )
    widths = shown.run(
        "return [...document.querySelectorAll('#charts figure:nth-child(3) rect')]"
        "  .map(bar => bar.getBoundingClientRect().width)"
    )
    return shown.run(script), widths


def test_staleness_histogram_has_several_bars_for_any_workers(browser):
    rng, shown = np.random.default_rng(0), BrowserPage(browser)
    few, many = [(0, 0), (3, 2), (49, 0), (49, 7)], [(499, 22), (4_000, 400), (0, 1e5)]
    for mean, spread in few + many:
        staleness = np.rint(rng.normal(mean, spread, 5000)).clip(0).astype(int)
        staleness[:20] = np.linspace(0, mean, 20)  # at the beginning
        with service.serve(RULE, START, page="127.0.0.1:0") as server:
            for number, value in enumerate(map(int, staleness)):
                answer = Answer(None, number + 1, number + 1, staleness=value)
                sessions.servicer(server).on_event("exchange", "a", "session", answer)
            sessions.listener(server, "page").monitor.update()
            browser.get(server.page_address)
            until(lambda: shown.find("#shown").is_displayed())
            found, widths = bars(shown)
        firsts, lasts, counts = np.transpose(found)
        assert list(firsts[1:]) == list(lasts[:-1] + 1)  # adjacent, without gaps
        assert 4 <= len(found) <= 48
        assert min(widths) >= 3
        assert sum(counts > 0.02 * 5000) >= (4 if spread else 1)
        for first, last, count in found:
            assert ((first <= staleness) & (staleness <= last)).sum() == count
        assert sum(counts) == 5000


def test_notices_and_totals_are_shown(browser):
    shown = BrowserPage(browser)
    with (
        service.serve(RULE, START, page="127.0.0.1:0") as server,
        service.connect(server.address, RULE) as center,
    ):
        session = center.join(EVIL)
        for number in range(1, 11):
            sent = ONES * (np.nan if number % 5 == 0 else 1.0)
            anchor = server.center.version
            session.exchange(Submission(number, sent, anchor, steps=7, weight=2.0))
        browser.get(server.page_address)
        text = f"Warning: 2 of the last 10 messages of worker {EVIL!r} were rejected"
        until(lambda: shown.text("#banner").startswith(text))
        assert "What to do: if messages are rejected" in shown.text("#banner")
        assert "56 of 70 delivered, weight 16" in shown.text("#tiles")
        assert shown.row(EVIL)["steps"] == "56"
        until(lambda: "were rejected" in shown.text("#events"))
        for number in range(11, 21):
            anchor = server.center.version
            session.exchange(Submission(number, ONES, anchor_version=anchor))
        until(lambda: not shown.text("#banner"))
        assert not shown.complaints()


def test_stalled_worker_is_not_shown_as_good(browser):
    shown = BrowserPage(browser)
    with service.serve(RULE, START, page="127.0.0.1:0") as server:
        with training(server.address, "anna"):
            browser.get(server.page_address)
            until(lambda: "connected" in shown.row("anna").get("state", ""))
            shown.run("clearTimeout(timer); paused = true")
            shown.run("newest.workers[0].stalled = arguments[0]; show(newest)", 23.4)
            assert shown.row("anna")["state"] == "stalled for 23 s"
            assert "good" not in shown.find("#rows .pill").get_attribute("class")
            assert "1 stalled" in shown.text("#tiles")
        assert not shown.complaints()
