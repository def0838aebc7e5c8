"""``python -m web.probe URL``: exit 0 when the URL answers 2xx within two seconds (container health checks)."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main(arguments: list[str]) -> int:
    """One GET; prints what it said when it is not well."""
    if len(arguments) != 1 or not arguments[0].startswith("http://"):
        sys.stderr.write("usage: python -m web.probe http://HOST:PORT/readyz\n")
        return 2
    try:
        with urllib.request.urlopen(arguments[0], timeout=2.0) as answer:  # noqa: S310 - http:// only, see above
            return 0 if 200 <= answer.status < 300 else 1
    except urllib.error.HTTPError as error:
        sys.stdout.write(f"{error.code} {error.read(200).decode(errors='replace')}\n")
    except OSError as error:
        sys.stdout.write(f"{error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
