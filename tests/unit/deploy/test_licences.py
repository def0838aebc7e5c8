"""Licences of what we stand on: what is read of a package, and what may be taken."""

from __future__ import annotations

from email.message import Message

import pytest

from deploy.licences import TAKEN, licence_of, locked, taken


def said(**headers: str | list[str]) -> Message:
    message = Message()
    for name, values in headers.items():
        for value in [values] if isinstance(values, str) else values:
            message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize(
    ("message", "licence"),
    [
        (said(License_Expression="MIT OR Apache-2.0"), "MIT OR Apache-2.0"),
        (said(License="MIT"), "MIT"),
        (said(License="Apache 2.0"), "Apache-2.0"),
        (said(License="A long text\nwhich grants you much"), None),
        (said(License="UNKNOWN", Classifier="License :: OSI Approved :: MIT License"), "UNKNOWN"),
        (said(Classifier=["License :: OSI Approved :: MIT License", "Topic :: Internet"]), "MIT"),
        (said(Classifier=["License :: OSI Approved :: Some Licence of Theirs"]), None),
        (said(Classifier=["License :: OSI Approved :: MIT License", "License :: Other/Proprietary License"]), None),
        (said(), None),
    ],
)
def test_what_a_package_says(message: Message, licence: str | None) -> None:
    """Its expression first, then the old field, then classifiers, all of which must be known."""
    assert licence_of("some-package", message) == licence


@pytest.mark.parametrize(
    ("expression", "passes"),
    [
        ("MIT", True),
        ("GPL-3.0-or-later", False),
        ("AGPL-3.0-only", False),
        ("UNKNOWN", False),
        ("GPL-3.0-or-later OR MIT", True),
        ("GPL-3.0-or-later AND MIT", False),
        ("(MIT OR GPL-2.0-only) AND (Zlib AND 0BSD)", True),
        ("MIT OR Apache-2.0 AND GPL-2.0-only", True),
        ("(MIT OR Apache-2.0) AND GPL-2.0-only", False),
        ("MIT/Apache-2.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
    ],
)
def test_what_may_be_taken(expression: str, passes: bool) -> None:
    """All of AND, one of OR; AND binds tighter."""
    assert taken(expression) == passes


@pytest.mark.parametrize("expression", ["", "MIT AND", "(MIT", "MIT)", "MIT MIT", "OR MIT"])
def test_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        taken(expression)


def test_copyleft_is_not_among_those_taken() -> None:
    assert not [licence for licence in TAKEN if "GPL" in licence or "SSPL" in licence or "BUSL" in licence]


def test_what_a_lock_installs_here() -> None:
    """Comments, other platforms' packages and second lines of one package are no packages."""
    lock = "a==1\n    # via b\nb==2 ; sys_platform == 'nowhere'\nc==3 ; python_full_version >= '3'\nc==4\n"
    assert list(locked(lock)) == ["a", "c"]
