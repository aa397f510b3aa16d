"""Pages in headless Chromium. A page may ask for nothing but its own address and what is below it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from conftest import check_module, check_tool

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Page


@contextmanager
def browsing(
    url: str, pages: int = 1, width: int = 900, scheme: Literal["light", "dark"] = "light"
) -> Iterator[list[Page]]:
    """New pages of one browser; at the end, that none wrote an error, opened a dialog or asked for else than `url`."""
    check_module("playwright")
    path = check_tool("chromium")
    from playwright.sync_api import sync_playwright

    errors, requests = list[str](), list[str]()

    def refused(dialog: Dialog) -> None:
        errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)
        found: list[Page] = []
        for _ in range(pages):
            page = context.new_page()
            page.on("console", lambda message: errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("dialog", refused)
            page.on("request", lambda request: requests.append(request.url))
            found.append(page)
        yield found
        browser.close()
    assert errors == []
    assert [address for address in requests if not address.startswith((url, "blob:"))] == []


@contextmanager
def opened(file: Path, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Iterator[Page]:
    """The page of a file, drawn."""
    with browsing(file.as_uri(), width=width, scheme=scheme) as (page,):
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready=true]")
        yield page
