"""Users and permissions of the bus, as nats-server's configuration.

Writes ``deploy/nats-accounts.conf`` from the catalogue of messages (`bus.permissions`); ``--check`` says whether it is
up to date. ``--secrets FOLDER`` makes a password for each user that has none there yet, a file for each process
(``TIDEGATE_NATS_PASSWORD_FILE``), and beside them for the server ``passwords.conf`` and ``nats-accounts.conf``: the
latter with users for each ``--policy``, ``--kv-policy`` and ``--worker``.

\b
Examples:
  python -m deploy.permissions --check
  python -m deploy.permissions --secrets secrets
  python -m deploy.permissions --secrets secrets --policy tenant-fairness --worker engine-1 --worker engine-2
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bus.permissions import users
from tidegate.supervisor.nats_accounts import ACCOUNTS, accounts_file, write_secrets

FILE = Path(__file__).resolve().parent / ACCOUNTS


@click.command(help=__doc__)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="A user for this policy; repeatable.")
@click.option(
    "--kv-policy",
    "kv_policies",
    multiple=True,
    metavar="NAME",
    help="The same for one that may read KV events, and so what every tenant's prompts say; repeatable.",
)
@click.option("--worker", "workers", multiple=True, metavar="ID", help="A user for this worker's bridge; repeatable.")
@click.option(
    "--secrets",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where passwords are kept; never in the repository.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when deploy/nats-accounts.conf is out of date.")
def main(
    policies: tuple[str, ...], kv_policies: tuple[str, ...], workers: tuple[str, ...], folder: Path | None, check: bool
) -> None:
    """See the module."""
    house = accounts_file(users())
    if check:
        if not FILE.exists() or FILE.read_text() != house:
            click.echo(f"{FILE} is out of date: python -m deploy.permissions", err=True)
            sys.exit(1)
        return
    if folder is None:
        if policies or kv_policies or workers:
            raise click.UsageError(
                "--policy, --kv-policy and --worker need --secrets FOLDER, where their accounts are written"
            )
        FILE.write_text(house)
        click.echo(f"{FILE}: {len(users())} users")
        return
    try:
        made = users(policies, workers, kv_policies)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        fresh = write_secrets(folder, made)
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror or error}") from error
    click.echo(f"{folder}: {len(made)} users, new passwords for {', '.join(fresh) or 'none'}")


if __name__ == "__main__":
    main()
