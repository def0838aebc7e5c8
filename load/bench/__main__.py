"""``python -m load.bench [hash|question|all] [--json]``."""

from __future__ import annotations

import json
import sys

import click

from load.bench import hashing, questions

BENCHMARKS = {"hash": hashing.run, "question": questions.run}


@click.command()
@click.argument("name", type=click.Choice([*BENCHMARKS, "all"]), default="all")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
def main(name: str, as_json: bool) -> None:
    """Run one benchmark, or all, and print one JSON object last.

    Machines are shared and noisy: trust the ratios, which come from the same run.
    """
    chosen = BENCHMARKS if name == "all" else {name: BENCHMARKS[name]}
    results: dict[str, dict[str, object]] = {}
    for each, run in chosen.items():
        if not as_json:
            click.echo(f"{each} ...", err=True)
        results[each] = run()
        if not as_json:
            for key, value in results[each].items():
                click.echo(f"  {key:24} {value}", err=True)
    click.echo(json.dumps(results if name == "all" else results[name]))


if __name__ == "__main__":
    sys.exit(main())
