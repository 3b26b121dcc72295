"""The page in a real Chromium over real services: ``make test-page``. Needs Debian's package ``chromium``."""

import json
import os
import re
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from gateway.decoding.plain_reason import PlainReason
from tests.e2e.servers import Stack, draft_process, target_process
from tests.http_server import serving
from tests.page.recording import RECORDING, record, save

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
    """Opens a page of its own context, with Run A alone unless ``with_plain_run``; in the end nothing may have been
    blocked, missing or thrown.
    """
    contexts, faults = [], []

    def open_at(url, *, may_fail=(), with_plain_run=False, **options):
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
        if not with_plain_run and page.locator(".run").count() == 2:
            page.locator(".remove").nth(1).click()
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


def wait_for_replay(page):
    """Its banner comes with its first run; the button can be pressed before that, too."""
    expect(page.locator("#banner")).to_be_visible()
    wait_for_end(page)


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
    expect(page.locator("#services")).to_contain_text("target python-12m: 0 sessions")
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
    for part in ("drafted and accepted", "probability", "round", "drafted in", "alternatives"):
        assert part in details
    facts = page.locator(".facts").inner_text()
    assert "acceptance length" in facts
    assert "tokens/s" in facts
    assert "acceptance length" in page.locator("#chart").get_attribute("aria-label")


def test_runs_stand_side_by_side(stack, open_page):
    page = open_page(stack.base_url, with_plain_run=True)
    page.click("#add")
    second, third = page.locator(".run").nth(1), page.locator(".run").nth(2)
    third.locator("[name=k]").select_option("2")
    third.locator("[name=rule]").select_option("token")
    generate(page)
    for run in (second, third):
        assert "the same as Run A" in run.locator(".facts").inner_text()
    expect(page.locator("#announcer")).to_contain_text("the texts are the same")
    assert "no speculation\nit was switched off" in second.locator(".facts").inner_text()
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
    page.locator(".remove").nth(1).click()
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
    page = open_page(stack.base_url, may_fail=["400 (Bad Request)"])
    page.check("[value=chat]")
    page.fill("[name=max_tokens]", "24")
    items, prompt = page.locator("#conversation li"), page.locator("#prompt")
    answers = []
    for number, text in enumerate(("Hello", "And then?")):
        prompt.fill(text)
        prompt.press("Enter")
        expect(prompt).to_have_value("")
        wait_for_end(page)
        assert items.count() == 2 * number + 1  # the latest answer stands in the runs
        answers.append(page.locator(".output").inner_text())
    assert items.all_text_contents() == ["user: Hello", f"assistant: {answers[0]}", "user: And then?"]
    question, answer = items.nth(0).bounding_box(), items.nth(1).bounding_box()
    assert answer["x"] + 100 < question["x"]
    assert question["x"] + question["width"] > answer["x"] + answer["width"]
    boxes = [page.locator(each).bounding_box()["y"] for each in ("#conversation", "#runs", "#prompt")]
    assert boxes == sorted(boxes)
    prompt.press("Shift+Enter")
    assert prompt.input_value() == "\n"
    page.fill("[name=max_tokens]", "1000000")
    prompt.fill("What is lost?")
    prompt.press("Enter")
    expect(page.locator(".run .error")).to_contain_text("maximum context length")
    assert prompt.input_value() == "What is lost?"  # nothing
    assert items.all_text_contents()[1::2] == [f"assistant: {each}" for each in answers]
    page.check("[value=completion]")
    assert prompt.input_value() == "def fibonacci(n):\n"
    expect(page.locator("#conversation")).to_be_hidden()
    page.check("[value=chat]")
    expect(items).to_have_count(4)
    page.click("#clear")
    assert items.count() == 0


def test_escape_stops(stack, open_page):
    page = open_page(stack.base_url)
    page.fill("[name=max_tokens]", "1800")
    page.click("#generate")
    page.wait_for_selector(".output .token", state="attached")
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
    assert "no speculation\nno draft was ready in time" in page.locator(".facts").inner_text()
    draft.restart_on_same_port()
    expect(badge).to_have_attribute("data-status", "up", timeout=TIMEOUT_MS)


def test_the_keyboard_is_enough(stack, open_page):
    page = open_page(stack.base_url, with_plain_run=True)
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
        "generate",
        "add",
        "max_tokens",
        "temperature",
        "seed",
        "alternatives",
        "method",
        "k",
        "rule",
    ]
    assert [each for each in seen if each in wanted] == wanted
    page.keyboard.press("End")
    details = page.locator(".token-details").first
    last = details.inner_text()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert details.inner_text() != last
    assert page.locator(".token.current").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(stack, open_page, scheme):
    page = open_page(stack.base_url, color_scheme=scheme, may_fail=["400 (Bad Request)"], with_plain_run=True)
    page.click("summary")
    generate(page)
    page.locator(".output .token").first.hover()
    assert serious_findings(page) == []
    page.check("[value=chat]")
    generate(page)
    assert serious_findings(page) == []
    page.check("[value=completion]")
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
        asked = []
        page.on("request", lambda request: asked.append(request.headers.get("authorization")))
        expect(page.locator(".badge")).to_have_text("the gateway asks for an API key")
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator(".badge")).to_have_text("the gateway refuses this API key")
        expect(page.locator("#key")).to_be_focused()
        page.wait_for_timeout(1500)  # more than its interval
        assert asked.count("Bearer wrong") == 1
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
    assert page.locator(".run").count() == 4
    assert page.locator(".run").first.locator(".output .token.draft").count() > 10
    assert "draft lost\nonce" in page.locator(".facts").nth(1).inner_text()
    assert page.locator(".run").nth(2).locator("[name=method]").input_value() == "ngram"
    assert "method\nngram" in page.locator(".facts").nth(2).inner_text()
    for other in (1, 2, 3):
        assert "the same as Run A" in page.locator(".facts").nth(other).inner_text()
    assert not any("/v1/" in url or url.endswith("/services") for url in asked)
    generate(page)  # again


@pytest.fixture
def play(stack, open_page):
    """Opens the replay of one run: its pieces as (milliseconds, their tokens), then its metrics."""

    def open_recording(pieces, metrics=None, **options):
        events = [
            [ms, {"choices": [{"text": "".join(each["text"] for each in tokens), "token_metrics": tokens}]}]
            for ms, tokens in pieces
        ]
        if metrics:
            events.append([events[-1][0] if events else 0, {"metrics": {"speculative_decoding": metrics}}])
        shipped = json.loads(RECORDING.read_text())
        recording = json.dumps(shipped | {"runs": [{"k": "", "rule": "", "events": events}]})
        page = open_page("about:blank", **options)
        page.route("**/recording.json", lambda route: route.fulfill(body=recording))
        page.goto(f"{stack.base_url}/?replay")
        wait_for_replay(page)
        return page

    return open_recording


def tokens_of(number, text=" word"):
    """One every 10 ms."""
    return [{"text": text, "origin": "target", "round": 0, "time_ns": i * 10**7} for i in range(number)]


def test_the_rate_is_that_of_the_gateway(play):
    """All events come in one burst; the gateway had a token every 10 ms."""
    page = play([(1, [token]) for token in tokens_of(301)])
    assert "tokens/s\n100\n" in page.locator(".facts").inner_text()
    assert "100 tokens/s" in page.locator("#announcer").inner_text()


def test_the_page_is_laid_out_once_a_frame(play):
    """1,800 events in one burst take a few layouts, not one each."""
    page = play([(1, [token]) for token in tokens_of(1800)], reduced_motion="reduce")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def count():
        return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}[
            "LayoutCount"
        ]

    before = count()
    generate(page)
    assert page.locator(".output .token").count() == 1800
    assert count() - before < 300


def test_charts_have_axes(play):
    page = play([(1, [token]) for token in tokens_of(301)])
    page.evaluate("""() => {
      window.written = [];
      const fillText = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.written.push(text);
        fillText.call(this, text, ...rest);
      };
    }""")
    generate(page)
    page.wait_for_timeout(100)  # a frame
    assert {"0 s", "1 s", "3 s", "0", "100", "400", "A"} <= set(page.evaluate("window.written"))


@pytest.mark.parametrize("reason", PlainReason)
def test_reasons_are_told_in_words(play, reason):
    page = play([(1, tokens_of(3))], {"num_spec_steps": 0, "no_speculation_reason": reason})
    (told,) = re.findall("no speculation\n(.*)", page.locator(".facts").inner_text())
    assert " " in told
    assert "_" not in told


@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_of_services_do_not_break_the_header(stack, open_page, width):
    answer = httpx.get(f"{stack.base_url}/services").json()
    for role in ("targets", "drafts"):
        answer[role][0]["name"] = f"unix:/tmp/{'folder-' * 8}/{role}/service.sock"
        answer[role].append(answer[role][0] | {"name": f"unix:/tmp/{'folder-' * 8}/{role}/other.sock"})
    page = open_page("about:blank", with_plain_run=True)
    page.set_viewport_size({"width": width, "height": 900})
    page.route("**/services", lambda route: route.fulfill(json=answer))
    page.goto(stack.base_url)
    expect(page.locator(".badge")).to_have_count(5)
    assert "folder" not in page.locator("header").inner_text()
    assert page.locator(".badge", has_text="other.sock").count() == 2
    assert page.locator("header").bounding_box()["height"] < 320
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [390, 900, 1280])
def test_runs_leave_no_hole(stack, open_page, width):
    page = open_page(stack.base_url)
    page.set_viewport_size({"width": width, "height": 900})
    area = page.locator("#runs").bounding_box()
    for number in range(1, 5):
        rows = {}
        for run in page.locator(".run").all():
            box = run.bounding_box()
            rows.setdefault(box["y"], []).append(box)
        for row in rows.values():
            assert max(box["x"] + box["width"] for box in row) == pytest.approx(area["x"] + area["width"], abs=2)
        assert len(rows) < number or number == 1 or width == 390
        if number < 4:
            page.click("#add")


HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>",
    "</div></section><iframe src=javascript:alert(3)>",
    "\u202e\u0000\ufffd{{constructor.constructor('alert(4)')()}}",
    "__proto__",
)


def test_hostile_text_stays_text(stack, open_page):
    tokens = [
        {"text": text, "origin": origin, "round": 1, "draft_ns": 1, "draft_wait_ns": 1, "time_ns": 1}
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
    wait_for_replay(page)
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
        [ms, {"choices": [{"delta": {"content": text}, "token_metrics": tokens_of(1, token)}]}]
        for ms, (text, token) in enumerate(pieces)
    ]
    shipped = json.loads(RECORDING.read_text())
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
    recording = record(stack)
    for run in recording["runs"]:
        assert run["events"][-1][1]["metrics"]
    if not request.config.getoption("--record"):
        return
    save(recording)
    page = open_page("about:blank", reduced_motion="reduce")
    page.set_viewport_size({"width": 1100, "height": 900})
    page.route("**/recording.json", lambda route: route.fulfill(path=RECORDING))
    page.goto(f"{stack.base_url}/?replay")
    wait_for_replay(page)
    page.evaluate("document.querySelector('#banner').remove()")
    page.locator(".run").first.locator(".token.draft").nth(8).hover()
    page.screenshot(path=SCREENSHOT, full_page=True)
    with Image.open(SCREENSHOT) as image:
        image.quantize(128).save(SCREENSHOT, optimize=True)
