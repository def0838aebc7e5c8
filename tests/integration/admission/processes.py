"""Admission processes of a test, and what their pages say."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tests.support.processes import HelperProcess

Start = Callable[..., AbstractAsyncContextManager[HelperProcess]]


def page(process: HelperProcess, path: str) -> str:
    """One of the process's health pages."""
    line = next(line for line in process.stderr.splitlines() if "http_listening" in line)
    url = next(word for word in line.split() if word.startswith("url=")).removeprefix("url=").strip('"')
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def is_ready(process: HelperProcess) -> bool:
    with contextlib.suppress(OSError):  # a refusal is one, too
        page(process, "/readyz")
        return True
    return False


def metric(process: HelperProcess, name: str) -> float:
    """The sum of a metric's samples; -1 while it does not answer."""
    try:
        lines = page(process, "/metrics").splitlines()
    except OSError:
        return -1.0
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)
