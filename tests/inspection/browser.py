"""A page in headless Chromium. It may ask for nothing but the file itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from conftest import check_module, check_tool

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Page


@contextmanager
def opened(file: Path, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """The page of a file, drawn; at the end, that it wrote no error, opened no dialog and asked for nothing else."""
    check_module("playwright")
    path = check_tool("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": 860}, color_scheme="dark" if scheme == "dark" else "light"
        )
        errors: list[str] = []
        requests: list[str] = []

        def refused(dialog: Dialog) -> None:
            errors.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", refused)
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready=true]")
        yield page
        browser.close()
    assert errors == []
    assert requests == [file.as_uri()]
