"""The page in a real Chromium over real services: ``make test-page``. Needs Debian's package ``chromium``."""

import json
import os
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.e2e.servers import Stack, draft_process, target_process
from tests.http_server import serving
from tests.page.recording import record, save

AXE = Path(__file__).parent / "node_modules/axe-core/axe.min.js"
SCREENSHOT = Path(__file__).parents[2] / "docs/playground.png"
TIMEOUT_MS = 60_000
#: Notes how many tokens the first ones were.
COUNT_FIRST_TOKENS = """() => {
  const output = document.querySelector(".output");
  const count = () => { window.numFirstTokens ||= output.querySelectorAll(".token").length; };
  new MutationObserver(count).observe(output, { childList: true });
}"""


@pytest.fixture(scope="module")
def stack():
    stack = Stack.start([target_process()], [draft_process()])
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert path, "Chromium is missing: apt-get install chromium, or set CHROMIUM to its path"
    with sync_playwright() as playwright:
        # Without a sandbox: tests often run as root, and the page is ours.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser):
    """Opens a page of its own context; in the end nothing may have been blocked, missing or thrown."""
    contexts, faults = [], []

    def open_at(url, *, may_fail=(), **options):
        context = browser.new_context(viewport={"width": 1100, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda message: (
                faults.append(message.text)
                if message.type == "error" and not any(text in message.text for text in may_fail)
                else None
            ),
        )
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert faults == []


def generate(page):
    """Click, which disables the button, and wait for the end."""
    page.click("#generate")
    wait_for_end(page)


def wait_for_end(page):
    expect(page.locator("#generate")).to_be_enabled(timeout=TIMEOUT_MS)


def serious_findings(page):
    """What axe-core finds, without what it calls minor or moderate."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        (each["id"], [node["html"] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def test_tokens_arrive_with_their_colours(stack, open_page):
    page = open_page(stack.base_url)
    expect(page.locator("#model")).not_to_be_empty()
    page.fill("#prompt", "")
    page.locator("#prompt").press_sequentially("def fibonacci(n):")
    page.fill("[name=max_tokens]", "300")
    page.evaluate(COUNT_FIRST_TOKENS)
    page.keyboard.press("Control+Enter")
    expect(page.locator(".output .token")).not_to_have_count(0, timeout=TIMEOUT_MS)
    wait_for_end(page)
    # Some were there while others were still to come.
    assert 0 < page.evaluate("window.numFirstTokens") < page.locator(".output .token").count()
    answer = stack.complete("def fibonacci(n):", max_tokens=300, temperature=0)
    assert page.locator(".output").inner_text() == answer["choices"][0]["text"]
    assert page.locator(".output .token.draft").count() > 20
    assert page.locator(".output .token.rejection").count() > 0
    page.locator(".output .token.draft").first.hover()
    details = page.locator(".token-details").inner_text()
    for part in ("accepted draft", "probability", "round", "drafted in", "alternatives"):
        assert part in details
    facts = page.locator(".facts").inner_text()
    assert "acceptance length" in facts
    assert "tokens/s" in facts
    assert "acceptance length" in page.locator("#chart").get_attribute("aria-label")


def test_runs_stand_side_by_side(stack, open_page):
    page = open_page(stack.base_url)
    page.click("#add")
    page.click("#add")
    second, third = page.locator(".run").nth(1), page.locator(".run").nth(2)
    second.locator("[name=k]").select_option("0")
    third.locator("[name=k]").select_option("2")
    third.locator("[name=rule]").select_option("token")
    generate(page)
    for run in (second, third):
        assert "the same as Run A" in run.locator(".facts").inner_text()
    assert "no speculation\noff" in second.locator(".facts").inner_text()
    assert second.locator(".output .token.draft").count() == 0
    assert third.locator(".output .token.draft").count() > 0
    page.uncheck("[name=one_by_one]")
    generate(page)
    assert "the same as Run A" in third.locator(".facts").inner_text()
    second.locator(".remove").click()
    assert page.locator(".run").count() == 2


def test_methods_stand_side_by_side(stack, open_page):
    page = open_page(stack.base_url)
    for _ in range(2):
        page.click("#add")
    runs = [page.locator(".run").nth(number) for number in range(3)]
    for run, method in zip(runs, ("draft_model", "ngram", "suffix+draft_model"), strict=True):
        run.locator("[name=method]").select_option(method)
    lengths = [run.locator("[name=k] option").last.get_attribute("value") for run in runs]
    assert lengths == ["4", "32", "32"]
    runs[2].locator("[name=k]").select_option("16")
    page.fill("#prompt", "class Stack:\n    def push(self):\n" * 3)
    page.fill("[name=temperature]", "0.5")
    generate(page)
    for run in runs[1:]:
        assert "the same as Run A" in run.locator(".facts").inner_text()
    assert "method\nngram" in runs[1].locator(".facts").inner_text()
    origins = [
        {name: run.locator(f".output .token.{name}").count() > 0 for name in ("draft", "lookup")} for run in runs[:2]
    ]
    assert origins == [{"draft": True, "lookup": False}, {"draft": False, "lookup": True}]
    assert runs[2].locator("[name=k]").input_value() == "16"
    runs[2].locator("[name=method]").select_option("draft_model")
    assert runs[2].locator("[name=k]").input_value() == ""  # no length of this method


def test_what_is_no_longer_offered_stays_chosen(stack, open_page):
    page = open_page("about:blank", may_fail=["400 (Bad Request)"])
    answer = httpx.get(f"{stack.base_url}/services").json()
    answer["methods"].append({"name": "eagle3", "num_speculative_tokens": 11})
    page.route("**/services", lambda route: route.fulfill(json=answer))
    page.goto(stack.base_url)
    run = page.locator(".run")
    method, length = run.locator("[name=method]"), run.locator("[name=k]")
    method.select_option("eagle3")
    length.select_option("11")
    answer["methods"].pop()
    expect(method.locator("option:checked")).to_have_text("eagle3 (not offered)", timeout=TIMEOUT_MS)
    expect(length.locator("option:checked")).to_have_text("11 (not offered)", timeout=TIMEOUT_MS)
    generate(page)
    expect(run.locator(".error")).to_contain_text("method is 'eagle3'; this server offers draft_model")
    del answer["methods"]  # as of an older gateway
    expect(method.locator("option")).to_have_count(2, timeout=TIMEOUT_MS)
    expect(method.locator("option:checked")).to_have_text("eagle3 (not offered)", timeout=TIMEOUT_MS)
    method.select_option("")
    assert length.input_value() == ""
    expect(method.locator("option")).to_have_count(1, timeout=TIMEOUT_MS)
    generate(page)
    assert run.locator(".output .token").count() > 0


def test_a_chat_goes_on(stack, open_page):
    page = open_page(stack.base_url)
    page.check("[value=chat]")
    for number, text in enumerate(("Hello", "And then?"), 1):
        page.fill("#prompt", text)
        page.fill("[name=max_tokens]", "24")
        generate(page)
        assert page.locator("#conversation li").count() == 2 * number
    said = page.locator("#conversation li").nth(3).inner_text()
    assert said == "assistant: " + page.locator(".output").inner_text()
    page.click("#clear")
    expect(page.locator("#conversation")).to_be_hidden()


def test_escape_stops(stack, open_page):
    page = open_page(stack.base_url)
    page.fill("[name=max_tokens]", "1800")
    page.click("#generate")
    page.wait_for_selector(".token", state="attached")
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator(".output .token").count() < 1800
    assert page.locator(".error:visible").count() == 0


def test_errors_are_shown(stack, open_page):
    page = open_page(stack.base_url, may_fail=["400 (Bad Request)"])
    page.fill("[name=max_tokens]", "1000000")
    page.click("#generate")
    expect(page.locator(".run .error")).to_contain_text("maximum context length")


def test_a_lost_draft_changes_its_badge(stack, open_page):
    page = open_page(stack.base_url)
    (draft,) = stack.drafts
    badge = page.locator(".badge", has_text="draft")
    expect(badge).to_have_attribute("data-status", "up")
    draft.kill()
    expect(badge).to_have_attribute("data-status", "down", timeout=TIMEOUT_MS)
    expect(page.locator("#announcer")).to_contain_text("draft")
    generate(page)
    assert page.locator(".output .token").count() == page.locator(".output .token.target").count() > 0
    draft.restart_on_same_port()
    expect(badge).to_have_attribute("data-status", "up", timeout=TIMEOUT_MS)


def test_the_keyboard_is_enough(stack, open_page):
    page = open_page(stack.base_url)
    expect(page.locator(".badge")).not_to_have_count(0)
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        here = page.evaluate("(e => e.id || e.name || e.className || e.tagName)(document.activeElement)")
        if here == "generate":
            page.keyboard.press("Enter")
            wait_for_end(page)
            page.locator("#generate").focus()  # a button that is disabled gives the focus away
        seen.append(here)
        if here == "output":
            break
    wanted = [
        "SUMMARY",
        "mode",
        "prompt",
        "max_tokens",
        "temperature",
        "seed",
        "alternatives",
        "generate",
        "add",
        "method",
        "k",
        "rule",
    ]
    assert [each for each in seen if each in wanted] == wanted
    page.keyboard.press("End")
    last = page.locator(".token-details").inner_text()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token-details").inner_text() != last
    assert page.locator(".token.current").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(stack, open_page, scheme):
    page = open_page(stack.base_url, color_scheme=scheme, may_fail=["400 (Bad Request)"])
    page.click("#add")
    page.click("summary")
    generate(page)
    page.locator(".output .token").first.hover()
    assert serious_findings(page) == []
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) < 64) is (scheme == "dark")
    page.fill("[name=max_tokens]", "1000000")
    page.click("#generate")
    expect(page.locator(".run .error").first).to_be_visible()
    assert serious_findings(page) == []


def test_a_key_is_asked_for(stack, open_page):
    locked = Stack.start(stack.targets, stack.drafts, "--api-key", "secret")
    try:
        page = open_page(locked.base_url, may_fail=["401 (Unauthorized)"])
        expect(page.locator(".badge")).to_have_text("the gateway asks for an API key")
        page.locator("#key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator(".badge", has_text="target")).to_have_attribute("data-status", "up")
        generate(page)
        assert page.locator(".output .token").count() > 0
        page.reload()
        expect(page.locator(".badge", has_text="target")).to_have_attribute("data-status", "up")
        assert page.evaluate("JSON.stringify([document.cookie, localStorage.length])") == '["",0]'
        page.close()  # it asks every second
    finally:
        locked.close()


def test_replay_needs_no_model(stack, open_page):
    page = open_page("about:blank")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{stack.base_url}/?replay")
    expect(page.locator("#banner")).to_contain_text("No model runs")
    wait_for_end(page)
    assert page.locator(".run").count() == 3
    assert page.locator(".run").first.locator(".output .token.draft").count() > 10
    assert page.locator(".run").nth(1).locator("[name=method]").input_value() == "ngram"
    assert "method\nngram" in page.locator(".facts").nth(1).inner_text()
    for other in (1, 2):
        assert "the same as Run A" in page.locator(".facts").nth(other).inner_text()
    assert not any("/v1/" in url or url.endswith("/services") for url in asked)
    generate(page)  # again


HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>",
    "</div></section><iframe src=javascript:alert(3)>",
    "\u202e\u0000\ufffd{{constructor.constructor('alert(4)')()}}",
    "__proto__",
)


def test_hostile_text_stays_text(stack, open_page):
    tokens = [
        {"text": text, "origin": origin, "round": 1, "draft_ns": 1, "draft_wait_ns": 1}
        for text, origin in zip(HOSTILE, ("draft", "<b>", "__proto__", "constructor"), strict=True)
    ]
    logprobs = {
        "tokens": list(HOSTILE), "token_logprobs": [-1, -9999, 0, -1], "top_logprobs": [{text: -1} for text in HOSTILE],
        "text_offset": [0, 1, 2, 3],
    }  # fmt: skip
    event = {"choices": [{"text": "".join(HOSTILE), "token_metrics": tokens, "logprobs": logprobs}]}
    recording = {
        "about": HOSTILE[0],
        "request": {"prompt": HOSTILE[1]},
        "services": {
            "model": HOSTILE[0], "num_speculative_tokens": 4, "num_running": 0, "num_waiting": 0,
            "lookups": [HOSTILE[0]], "methods": [{"name": HOSTILE[0], "num_speculative_tokens": 4}],
            "targets": [{"name": HOSTILE[1], "status": "down", "reason": HOSTILE[0], "num_sessions": 0, "kv_use": 0}],
            "drafts": [],
        },
        "runs": [{"method": HOSTILE[0], "k": "", "rule": "", "events": [[1, event]]}],
    }  # fmt: skip
    page = open_page("about:blank")
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.route("**/recording.json", lambda route: route.fulfill(body=json.dumps(recording)))
    page.goto(f"{stack.base_url}/?replay")
    wait_for_end(page)
    for number, text in enumerate(HOSTILE):
        token = page.locator(".output .token").nth(number)
        assert token.evaluate("e => e.textContent") == text
        assert token.evaluate("e => e.childElementCount") == 0
        token.hover(force=True)
    assert page.locator("img, iframe, body script").count() == 0
    assert dialogs == []


def test_text_that_comes_after_its_token_is_shown_once(stack, open_page):
    """A chat holds white space back: its token tells it before the text does."""
    pieces = [("", "\n"), ("\nbar", "bar"), (" baz", "")]
    events = [
        [ms, {"choices": [{"delta": {"content": text}, "token_metrics": [{"text": token, "origin": "target"}]}]}]
        for ms, (text, token) in enumerate(pieces)
    ]
    shipped = json.loads((Path(__file__).parents[2] / "gateway/playground/recording.json").read_text())
    recording = json.dumps(shipped | {"runs": [{"k": "", "rule": "", "events": events}]})
    page = open_page("about:blank")
    page.route("**/recording.json", lambda route: route.fulfill(body=recording))
    page.goto(f"{stack.base_url}/?replay")
    expect(page.locator(".output")).to_contain_text("baz")
    for _ in range(2):
        wait_for_end(page)
        assert page.locator(".output").evaluate("e => e.textContent") == "\nbar baz"
        assert page.locator(".output .token").all_text_contents() == ["\n", "bar"]
        generate(page)  # again, from nothing


class PrefixProxy(BaseHTTPRequestHandler):
    """Serves a gateway below /tandem/, as a reverse proxy does."""

    gateway = ""

    def do_GET(self):
        self._forward()

    def do_POST(self):
        self._forward()

    def _forward(self):
        if not self.path.startswith("/tandem/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        sent = {name: value for name, value in self.headers.items() if name.lower() in ("accept", "content-type")}
        url = self.gateway + self.path.removeprefix("/tandem")
        with httpx.stream(self.command, url, content=body, headers=sent, timeout=60) as answer:
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            for piece in answer.iter_raw():
                self.wfile.write(piece)

    def log_message(self, *_):
        """Say nothing."""


def test_behind_a_prefix(stack, open_page):
    handler = type("Handler", (PrefixProxy,), {"gateway": stack.base_url})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        page = open_page(f"{url}/tandem/")
        expect(page.locator(".badge", has_text="target")).to_have_attribute("data-status", "up")
        generate(page)
        assert page.locator(".output .token").count() > 0
        page.goto(f"{url}/tandem/?replay")
        expect(page.locator(".output .token.draft")).not_to_have_count(0)


def test_recording_and_screenshot(stack, open_page, request):
    """With ``--record`` they are made anew; without, a recording of today still has the fields of the shipped one."""
    recording = record(stack.base_url)
    for run in recording["runs"]:
        assert run["events"][-1][1]["metrics"]
    if not request.config.getoption("--record"):
        return
    save(recording)
    page = open_page(stack.base_url)
    page.set_viewport_size({"width": 1000, "height": 900})
    page.click("#add")
    for run, method in enumerate(("draft_model", "ngram")):
        page.locator(".run").nth(run).locator("[name=method]").select_option(method)
    page.fill("[name=max_tokens]", "64")
    for _ in range(2):  # the first run after a start is slower
        generate(page)
    page.locator(".run").first.locator(".token.draft").nth(8).hover()
    page.screenshot(path=SCREENSHOT, full_page=True)
    with Image.open(SCREENSHOT) as image:
        image.quantize(64).save(SCREENSHOT, optimize=True)
