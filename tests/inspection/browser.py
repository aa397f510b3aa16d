"""Pages in headless Chromium. A page may ask for nothing but its own address and what is below it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conftest import check_module, check_tool

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A browser. Nothing may run an event loop in the thread while it is open."""
    check_module("playwright")
    path = check_tool("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", *flags])
        yield browser
        browser.close()


@contextmanager
def browsing(
    url: str,
    pages: int = 1,
    width: int = 900,
    scheme: Literal["light", "dark"] = "light",
    browser: Browser | None = None,
) -> Iterator[list[Page]]:
    """New pages of one browser; at the end, that none wrote an error, opened a dialog or asked for else than `url`."""
    errors, requests = list[str](), list[str]()

    def refused(dialog: Dialog) -> None:
        errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    with nullcontext(browser) if browser else chromium() as own:
        context = own.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)
        found: list[Page] = []
        for _ in range(pages):
            page = context.new_page()
            page.on("console", lambda message: errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("dialog", refused)
            page.on("request", lambda request: requests.append(request.url))
            found.append(page)
        yield found
        context.close()
    assert errors == []
    assert [address for address in requests if not address.startswith((url, "blob:"))] == []


@contextmanager
def opened(file: Path, width: int = 1280, scheme: Literal["light", "dark"] = "light", **options: Any) -> Iterator[Page]:
    """The page of a file, drawn."""
    with browsing(file.as_uri(), width=width, scheme=scheme, **options) as (page,):
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready=true]")
        yield page
