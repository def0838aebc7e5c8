"""What the documents name exists: files, settings, metrics, row fields, subjects."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import fields

from bus.settings import NOT_SETTINGS, CommonSettings
from load.sim.scenarios import policy_names
from load.sim.workloads import MIXES
from schemas.catalog import CHANNELS
from schemas.trace import AgentContext, RequestMetrics, TraceRow
from tidegate.supervisor.check import SETTINGS
from tidegate.supervisor.config import UpSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_and_settings_exist(page: Path) -> None:
    """Every relative link leads to a file; every TIDEGATE_ variable is a setting."""
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    variables = {name for name in re.findall(r"TIDEGATE_[A-Z_]*[A-Z](?![A-Z_<])", text) if name not in OTHER_VARIABLES}
    assert sorted(variables - setting_variables()) == []


OTHER_VARIABLES = NOT_SETTINGS | {"TIDEGATE_IMAGE"}
"""Read by the compose file, the Makefile or `kvcore`."""


@cache
def setting_variables() -> set[str]:
    names = {f"TIDEGATE_{field.name.upper()}" for field in fields(CommonSettings)}
    sections: dict[str, type[CommonSettings]] = {**SETTINGS, "up": UpSettings}
    for section, kind in sections.items():
        names |= {f"TIDEGATE_{section.upper()}_{field.name.upper()}" for field in fields(kind)}
    return names


def test_every_field_of_a_row_is_explained() -> None:
    """The table in docs/operations.md has each field, by its name."""
    names = [field.name for field in (*fields(TraceRow), *fields(AgentContext), *fields(RequestMetrics))]
    assert [name for name in names if name != "request" and not re.search(rf"[`.]{name}`", OPERATIONS)] == []


def test_every_policy_is_explained() -> None:
    """The table in docs/policies.md has each that `tidegate simulate` can compare, and each workload is named."""
    page = (ROOT / "docs" / "policies.md").read_text()
    assert [name for name in policy_names() if f"`{name}`" not in page] == []
    assert [name for name in MIXES if f"`{name}`" not in page] == []


def test_every_metric_that_is_explained_exists() -> None:
    """By its whole name in the source, or by the part that a helper there puts behind a prefix."""
    folders = ("bus", "replica", "services", "web", "load")
    source = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    unknown = []
    for name in set(re.findall(r"`(tidegate_\w+)", OPERATIONS)):
        plain = name.removesuffix("_total")
        families = ("ingress", "bus", "trace_rows", "bridge", "index", "pool_bridge")
        prefixes = ("", "tidegate_", *(f"tidegate_{family}_" for family in families))
        parts = {name, *(plain.removeprefix(prefix) for prefix in prefixes)}
        if not any(f'"{part}"' in source or f'}}{part}"' in source for part in parts):
            unknown.append(name)
    assert unknown == []


def test_every_subject_in_the_table_is_one_of_ours() -> None:
    """As the catalogue writes it, with the parameters in its braces."""
    ours = {re.sub(r"\{(\w+)\}", r"<\1>", channel.address) for channel in CHANNELS}
    ours |= {re.sub(r"^(tg\.v1\.request)\.\w+", r"\1.<event>", address) for address in ours}
    ours |= {address.replace("<event_type>", "request_end") for address in ours}
    rows = [line for line in OPERATIONS.splitlines() if line.startswith("| `tg.v1.")]
    named = {subject for row in rows for subject in re.findall(r"`(tg\.v1[^`]*)`", row)}
    assert len(named) > 10
    assert sorted(named - ours) == []


def test_the_example_is_python() -> None:
    """It compiles; the route policy of the README is run by its own test."""
    (example,) = re.findall(r"```python\n(.*?)```", OPERATIONS, re.DOTALL)
    compile(example, os.devnull, "exec")
