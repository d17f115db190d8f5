"""Looks at the pages of an appliance in Chromium, and prints what it saw as JSON. Runs in the image beside this file.

python3 look.py ADDRESS FOLDER     with the API key in KEY; pictures are written into FOLDER
python3 look.py ADDRESS FOLDER fleet   looks at three models, alpha, beta and gamma, in memory for two

Makes a file FOLDER/hurry when it has seen the model being fetched, FOLDER/second when another model has to come, and
FOLDER/kill when the engine has to die.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

AXE = Path("/opt/axe/axe.min.js")
LAPTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 180_000  # for what takes a second on a quiet machine
HOSTILE = (
    "# Title <script>window.evil=1</script> <img src=x onerror=window.evil=2> [a](javascript:window.evil=3) "
    "![p](https://evil.example/p.png) <style>body{display:none}</style> <iframe src=https://evil.example></iframe> "
    "\u001b[2J\u202e <form action=/logout method=post><button>x</button></form>"
)
# The worst that a page of another program on the same host can do with the browser's cookies.
FOREIGN = b"<!doctype html><title>other</title>"
# What another program at the same address may have kept under the names of the chat page.
PLANTED = {
    "chats": [
        None,
        {"id": "a", "title": {"x": 1}, "messages": [{"role": "user", "text": 7}, {"role": "assistant", "calls": {}}]},
        {"id": "a", "title": "twice", "messages": [{"role": "user", "text": "hi"}]},
        {
            "id": "b",
            "title": HOSTILE,
            "messages": [
                {"role": "user", "text": HOSTILE, "images": ["https://evil.example/p.png", "javascript:window.evil=4"]},
                {"role": "assistant", "text": HOSTILE, "reasoning": [HOSTILE], "seconds": "x", "speed": {}},
            ],
        },
    ],
    "chat-settings": {"system": {"x": 1}, "max_tokens": []},
    "language": "xx",
    "theme": "<script>",
}


class Looker:
    """A browser, and all that went wrong in it."""

    def __init__(self, browser: Browser, address: str, key: str, folder: Path) -> None:
        self.browser = browser
        self.address = address
        self.key = key
        self.folder = folder
        self.violations: list[str] = []
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.loaded: dict[str, int] = {}
        self.axe: dict[str, list[Any]] = {}
        self.paint_ms: dict[str, float] = {}
        self.state: Any = None

    @contextlib.contextmanager
    def page(self, **options: Any) -> Iterator[Page]:
        """Yield a page with the session so far, which is watched for whatever it must not do."""
        context = self.browser.new_context(storage_state=self.state, **{"viewport": LAPTOP, **options})
        try:
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            page.on("pageerror", lambda error: self.errors.append(str(error)))
            page.on("console", lambda message: self._note(message.text))
            page.on("request", lambda request: self._note_request(request.url))
            self._count_bytes(context, page)
            yield page
            self.state = context.storage_state()
        finally:
            context.close()

    def _note(self, text: str) -> None:
        if "Content Security Policy" in text or "Content-Security-Policy" in text:
            self.violations.append(text[:300])

    def _note_request(self, url: str) -> None:
        if not url.startswith((self.address, "data:", "blob:")):
            self.foreign.append(url[:200])

    def _count_bytes(self, context: BrowserContext, page: Page) -> None:
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        urls: dict[str, str] = {}
        session.on(
            "Network.responseReceived", lambda event: urls.update({event["requestId"]: event["response"]["url"]})
        )

        def finished(event: dict[str, Any]) -> None:
            url = urls.get(event["requestId"], "")
            path = url.removeprefix(self.address)
            if path in ("/", "/chat/") or path.startswith("/assets/"):
                self.loaded[path] = max(self.loaded.get(path, 0), int(event["encodedDataLength"]))

        session.on("Network.loadingFinished", finished)

    def examine(self, page: Page, name: str) -> None:
        """Look for what keeps people out, by axe. By the debugger's own door, since the page's policy forbids more."""
        session = page.context.new_cdp_session(page)
        session.send("Runtime.evaluate", {"expression": AXE.read_text()})
        run = "axe.run().then(found => JSON.stringify(found.violations.map(v => [v.id, v.nodes.map(n => n.html)])))"
        found = session.send("Runtime.evaluate", {"expression": run, "awaitPromise": True})
        self.axe[name] = json.loads(found["result"]["value"])

    def picture(self, page: Page, name: str, *, is_full: bool = False) -> None:
        page.screenshot(path=str(self.folder / f"{name}.png"), full_page=is_full)

    def note_paint(self, page: Page, name: str) -> None:
        script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        found = page.evaluate(script)
        if found is not None:
            self.paint_ms[name] = round(found)


def first_start(looker: Looker) -> dict[str, Any]:
    """Log in, and watch the dashboard until the model is ready and measured."""
    phases: list[str] = []
    fetching = ""
    with looker.page() as page:
        page.goto(f"{looker.address}/")
        page.wait_for_selector("#key")
        login = page.inner_text("body")
        looker.examine(page, "login")
        page.fill("#key", "wrong")
        page.click("button[type=submit]")
        until(page, "document.querySelector('[role=alert]').textContent.length > 0")
        refused = page.inner_text("[role=alert]")
        page.fill("#key", looker.key)
        page.click("button[type=submit]")
        page.wait_for_selector("#now .pill")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            classes = page.get_attribute("#now .pill", "class") or ""
            phase = classes.removeprefix("pill ").strip()
            if phase and phase not in phases:
                phases.append(phase)
                looker.picture(page, f"dashboard-{phase}")
            if phase == "fetching" and not fetching and (fetching := fetch_shown(page)):
                looker.picture(page, "dashboard-fetching")
                (looker.folder / "hurry").touch()
            if phase == "ready" and page.locator("#curve canvas").count() == 2:
                break
            time.sleep(0.1)
    return {"login": login, "refused": refused, "phases": phases, "fetching": fetching}


def fetch_shown(page: Page) -> str:
    """Return the words beside the bar and the bar's value, once both tell of a rate; empty before that."""
    words, value = page.inner_text("#now .phase"), page.get_attribute("#now progress", "value")
    return f"{words} {value}" if "MB/s" in words and float(value or 0) > 0.02 else ""


def models(looker: Looker) -> dict[str, Any]:
    """Watch another model come, load it and unload it."""
    with looker.page() as page:
        page.goto(f"{looker.address}/")
        page.wait_for_selector("#requests tbody tr")
        was_shown = page.query_selector("#models") is not None
        (looker.folder / "second").touch()
        row = "#models tr:has(th:has-text('second'))"
        page.wait_for_selector(row)
        before = page.inner_text(row)
        page.click(f"{row} button")
        page.wait_for_selector(f"{row} .pill.ready")
        loaded = page.inner_text(row)
        bottom = bottom_of_curve(page)
        looker.examine(page, "models")
        looker.picture(page, "dashboard-models")
        page.click(f"{row} a")
        page.wait_for_selector("#now .pill")
        until(page, "document.querySelector('header .model').textContent === 'second'")
        page.wait_for_selector("#why tbody tr")
        page.click(f"{row} button")
        page.wait_for_selector(f"{row} .pill:not(.ready)")
        after, rows = page.inner_text(row), page.locator("#requests tbody tr").count()
    return {
        "was_shown": was_shown,
        "before": before,
        "loaded": loaded,
        "after": after,
        "bottom": bottom,
        "requests_of_second": rows,
    }


def bottom_of_curve(page: Page) -> float:
    return float(page.evaluate("document.querySelector('#curve').getBoundingClientRect().bottom"))


def fleet(looker: Looker) -> dict[str, Any]:
    """Ask a model that sleeps, in memory that two others hold; see who makes room, on both pages."""
    with looker.page() as page:
        page.goto(f"{looker.address}/")
        page.fill("#key", looker.key)
        page.click("button[type=submit]")
        page.wait_for_selector(pill("alpha", "ready"))
        page.click(button("beta"))
        page.wait_for_selector(pill("beta", "ready"))
        seen: dict[str, Any] = {"two": page.inner_text("#models"), "bars": bars(page)}
        page.evaluate(WATCH_GAMMA)
        seen["chat"] = asked(looker, page.context, "gamma")
        page.wait_for_selector(pill("gamma", "ready"))
        seen["states"] = page.evaluate("window.states")
        seen["three"] = page.inner_text("#models")
        seen["ready"] = page.locator("#models .pill.ready").count()
        seen["bottom"] = bottom_of_curve(page)
        looker.examine(page, "fleet")
        looker.picture(page, "fleet")
        page.route(
            "**/models/load",
            lambda route: route.fulfill(status=400, json={"error": {"message": "there is no room <b>here</b>"}}),
        )
        page.locator("#models tr:has(.pill:not(.ready)) button").first.press("Enter")
        page.wait_for_selector("#models [role=alert]:not(:empty)")
        seen["refused"] = page.inner_text("#models [role=alert]")
        looker.examine(page, "fleet, refused")
    for name, options in (
        ("fleet, dark", {"color_scheme": "dark"}),
        ("fleet, phone", {"viewport": PHONE}),
        ("fleet, chinese", {"locale": "zh-CN"}),
    ):
        with looker.page(**options) as page:
            page.goto(f"{looker.address}/?model=gamma")
            page.wait_for_selector("#requests tbody tr")
            page.wait_for_selector("#models tbody tr")
            seen[name] = page.inner_text("#models")
            seen[f"{name}, overflow"] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            looker.examine(page, name)
            looker.picture(page, name)
    seen["requests_of_gamma"] = requests_of(looker, "gamma")
    seen["requests_of_beta"] = requests_of(looker, "beta")
    return seen


# Every state of gamma that the dashboard shows, in their order.
WATCH_GAMMA = """() => {
    window.states = [];
    const look = () => {
        const row = [...document.querySelectorAll("#models tbody tr")].find((one) => one.innerText.startsWith("gamma"));
        const state = row?.querySelector(".pill").innerText;
        if (state && state !== window.states.at(-1)) window.states.push(state);
    };
    const all = {subtree: true, childList: true, characterData: true};
    new MutationObserver(look).observe(document.querySelector("#models"), all);
    look();
}"""


def pill(name: str, state: str) -> str:
    return f"#models tr:has(th:has-text('{name}')) .pill.{state}"


def button(name: str) -> str:
    return f"#models tr:has(th:has-text('{name}')) button"


def bars(page: Page) -> list[list[float]]:
    """Return value and end of each bar of memory."""
    found: list[list[float]] = page.evaluate(
        "[...document.querySelectorAll('#models meter')].map(m => [m.value, m.max])"
    )
    return found


def requests_of(looker: Looker, name: str) -> int:
    with looker.page() as page:
        page.goto(f"{looker.address}/?model={name}")
        until(page, f"document.querySelector('header .model')?.textContent === '{name}'")
        page.wait_for_selector("#requests p, #requests tbody")
        rows: int = page.locator("#requests tbody tr").count()
        return rows


def asked(looker: Looker, context: BrowserContext, name: str) -> dict[str, Any]:
    """Ask a model on the chat page; return what was said of its load, and its answer."""
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{looker.address}/chat/")
    page.wait_for_selector("header select")
    page.select_option("header select", name)
    page.wait_for_selector("main .hint")
    until(page, "/ m?s/.test(document.querySelector('main .hint').textContent)")
    hint, banners = page.inner_text("main .hint"), page.locator("main .banner").count()
    looker.examine(page, "chat, asleep")
    limit(page, 8)
    page.fill(".composer textarea", "Say hello.")
    page.keyboard.press("Enter")
    page.wait_for_selector("article .waiting")
    waiting = page.inner_text("article .waiting")
    settled(page)
    page.wait_for_selector("main .hint", state="detached")
    answer, problems = page.inner_text("article.answer"), page.locator("article .problem").count()
    left = page.locator("article .waiting").count()
    page.close()
    return {"hint": hint, "banners": banners, "waiting": waiting, "answer": answer, "problems": problems, "left": left}


def error(looker: Looker) -> dict[str, Any]:
    """Look at the dashboard after the engine was killed."""
    with looker.page() as page:
        page.goto(f"{looker.address}/")
        page.wait_for_selector("#requests tbody tr")
        (looker.folder / "kill").touch()
        page.wait_for_selector("#now .problem.error")
        words = page.inner_text("#now .problem.error")
        page.wait_for_selector("#curve canvas")
        page.wait_for_selector("#machine .doctor li")
        looker.examine(page, "dashboard-error")
        looker.picture(page, "dashboard-error")
    return {"words": words}


def planted(looker: Looker) -> dict[str, Any]:
    """Open the chat page on what another program has kept under its names, and every chat of it."""
    with looker.page() as page:
        page.goto(f"{looker.address}/chat/")
        page.wait_for_selector(".composer textarea")
        for name, value in PLANTED.items():
            text = value if isinstance(value, str) else json.dumps(value)
            page.evaluate("([name, text]) => localStorage.setItem(name, text)", [name, text])
        page.reload()
        page.wait_for_selector(".composer textarea")
        titles = page.locator("aside button.title")
        for number in range(titles.count()):
            titles.nth(number).click()
            page.wait_for_timeout(200)
        seen = {
            "chats": titles.count(),
            "pictures": page.locator("article img").count(),
            "elements": page.locator(".markdown :is(script, img, style, iframe, form, button)").count(),
            "evil": page.evaluate("window.evil ?? null"),
            "language": page.evaluate("document.documentElement.lang"),
        }
        page.evaluate("localStorage.clear()")
    return seen


def chat(looker: Looker) -> dict[str, Any]:
    """Ask, ask again, edit, stop, and be answered with something hostile."""
    seen: dict[str, Any] = {}
    with looker.page() as page:
        page.goto(f"{looker.address}/chat/")
        looker.note_paint(page, "chat")
        limit(page, 24)  # a small model may go on for ever
        page.fill(".settings input >> nth=0", "0")  # or end after two words, when it has to be stopped
        send(page, "What is a lighthouse for? One sentence.")
        seen["answer"] = page.inner_text("article.answer .markdown")
        seen["figures"] = page.inner_text("article.answer footer small")
        page.click("article.answer footer button:last-child")  # once more
        settled(page)
        seen["again"] = page.locator("article.answer").count()
        page.click("article.question footer button")
        page.fill("article.question textarea", "Say hello.")
        page.click("article.question button[type=submit]")
        settled(page)
        seen["edited"] = page.inner_text("article.question p")
        limit(page, 1000)  # to be stopped long before
        page.fill(".composer textarea", "Count from one to five hundred, in words.")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('article.answer')[1]?.innerText.length > 20")
        page.click(".composer button[type=button]")
        settled(page)
        seen["stopped"] = page.locator(".composer button[type=submit]").count()
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=hostile_stream()),
        )
        send(page, "Be hostile.")
        page.wait_for_timeout(500)
        seen["evil"] = page.evaluate("window.evil ?? null")
        seen["elements"] = page.evaluate(
            "[...document.querySelectorAll('.markdown :is(script, img, style, iframe, form, button)')].length"
        )
        seen["hrefs"] = page.evaluate("[...document.querySelectorAll('.markdown a')].map(a => a.getAttribute('href'))")
        looker.examine(page, "chat")
        looker.picture(page, "chat-laptop")
    with looker.page(viewport=PHONE, color_scheme="dark") as page:
        page.goto(f"{looker.address}/chat/")
        page.wait_for_selector(".composer textarea")
        looker.examine(page, "chat, phone, dark")
    return seen


def until(page: Page, condition: str) -> None:
    """Wait until the expression is true. Playwright's own wait would run text as code in the page, which it forbids."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            message = f"not within {WAIT_MS} ms: {condition}"
            raise TimeoutError(message)
        page.wait_for_timeout(50)


def limit(page: Page, tokens: int) -> None:
    """Set the most tokens of an answer, as a user does."""
    page.evaluate("document.querySelector('.settings').open = true")
    page.fill(".settings input >> nth=2", str(tokens))


def send(page: Page, text: str) -> None:
    page.wait_for_selector(".composer button[type=submit]")
    until(page, "!document.querySelector('main .banner')")  # the model serves
    page.fill(".composer textarea", text)
    page.keyboard.press("Enter")
    page.wait_for_selector("article.answer")
    settled(page)


def settled(page: Page) -> None:
    page.wait_for_timeout(200)
    page.wait_for_selector(".composer button[type=submit]")
    page.wait_for_timeout(200)


def hostile_stream() -> str:
    delta = {"choices": [{"index": 0, "delta": {"content": HOSTILE}, "finish_reason": None}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return f"data: {json.dumps(delta)}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n\n"


def dashboard(looker: Looker) -> dict[str, Any]:
    """Look at all views, on a laptop, on a phone, in the dark and in Chinese."""
    seen: dict[str, Any] = {}
    with looker.page() as page:
        page.goto(f"{looker.address}/")
        page.wait_for_selector("#requests tbody tr")
        page.wait_for_selector("#machine .doctor li")
        page.wait_for_selector("#why tbody tr")
        looker.note_paint(page, "dashboard")
        seen["views"] = {name: page.inner_text(f"#{name}") for name in ("now", "why", "curve", "requests", "machine")}
        seen["bottom_of_curve"] = bottom_of_curve(page)
        looker.examine(page, "dashboard")
        looker.picture(page, "dashboard-laptop")
    ways: dict[str, dict[str, Any]] = {
        "dashboard-dark": {"color_scheme": "dark"},
        "dashboard-phone": {"viewport": PHONE},
        "dashboard-chinese": {"locale": "zh-CN"},
    }
    for name, options in ways.items():
        with looker.page(**options) as page:
            page.goto(f"{looker.address}/")
            page.wait_for_selector("#requests tbody tr")
            page.wait_for_selector("#curve canvas")
            page.wait_for_timeout(300)
            seen[name] = page.evaluate("[...document.querySelectorAll('h2')].map(h => h.innerText)")
            seen[f"{name}, overflow"] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            looker.examine(page, name)
            looker.picture(page, name, is_full=name == "dashboard-phone")
    return seen


def foreign_page(looker: Looker) -> dict[str, Any]:
    """Let a page of another program on this host use the session's cookie."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(FOREIGN)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    statuses: list[int] = []
    context = looker.browser.new_context(storage_state=looker.state)
    page = context.new_page()
    page.on(
        "response", lambda answer: statuses.append(answer.status) if answer.url.startswith(looker.address) else None
    )
    page.goto(f"http://127.0.0.1:{server.server_port}/")
    post = """async (to) => fetch(to, {method: "POST", mode: "no-cors", credentials: "include", body: "{}"}).then(
        () => "sent", () => "failed")"""
    page.evaluate(post, f"{looker.address}/v1/chat/completions")
    page.evaluate(post, f"{looker.address}/models/unload")
    page.evaluate(post, f"{looker.address}/logout")
    read = page.evaluate(
        "async (from) => fetch(from, {credentials: 'include'}).then(a => a.text(), () => 'not readable')",
        f"{looker.address}/appliance/v1/status",
    )
    context.close()
    server.shutdown()
    return {"statuses": statuses, "read": read}


def one_model(looker: Looker) -> dict[str, Any]:
    """Look at a first start, and at all that one model needs; then at a second one."""
    seen = {"start": first_start(looker), "chat": chat(looker), "dashboard": dashboard(looker)}
    seen["planted"] = planted(looker)
    seen["foreign"] = foreign_page(looker)
    seen["models"] = models(looker)
    seen["error"] = error(looker)
    return seen


def main() -> int:
    address, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=WAIT_MS,
        )
        looker = Looker(browser, address, os.environ["KEY"], folder)
        seen = {"fleet": fleet(looker)} if "fleet" in sys.argv[3:] else one_model(looker)
        browser.close()
    print(
        json.dumps(
            {
                **seen,
                "violations": looker.violations,
                "errors": looker.errors,
                "foreign_requests": looker.foreign,
                "loaded": looker.loaded,
                "axe": looker.axe,
                "paint_ms": looker.paint_ms,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
