"""A small file system of its own for a test: ext4 on a loop device, or a tmpfs, in a private mount namespace.

Nothing is mounted where others see it, and nothing is left when the test ends however it ends: the namespace goes with the
process that holds it. Root gets ext4; others a tmpfs in a user namespace, where the machine allows one.

    with SmallDisk.make(tmp_path, 64) as disk:      # skips the test, with the reason, where it cannot be made
        process = await asyncio.create_subprocess_exec(*disk.inside, "program", disk.path)
        disk.fill(leave_bytes=0)
        disk.free()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

import pytest

_FILLER = "filler"
_STEP_BYTES = 1 << 20


class SmallDisk:
    """Made by `make`."""

    def __init__(self, kind: str, path: Path, holder: subprocess.Popen[bytes], inside: list[str]) -> None:
        self.kind = kind
        # As processes inside see it.
        self.path = str(path)
        # Command prefix: runs the rest inside.
        self.inside = inside
        self._holder = holder
        self._filler = f"/proc/{holder.pid}/root{path}/{_FILLER}"

    @classmethod
    def make(cls, directory: Path, megabytes: int) -> SmallDisk:
        """`directory` holds the image and the mount point. Skips the test where no way works."""
        mount = directory / "small"
        mount.mkdir()
        reasons: list[str] = []
        for kind in ("ext4", "tmpfs"):
            disk = cls._try(kind, directory, mount, megabytes, reasons)
            if disk is not None:
                return disk
        pytest.skip(f"no small file system can be made on this machine: {'; '.join(reasons)}")

    @classmethod
    def _try(
        cls, kind: str, directory: Path, mount: Path, megabytes: int, reasons: list[str]
    ) -> SmallDisk | None:
        needed = ["unshare", "nsenter", "mount", *(["mkfs.ext4"] if kind == "ext4" else [])]
        missing = [name for name in needed if shutil.which(name) is None]
        root = os.geteuid() == 0
        if missing or (kind == "ext4" and not root):
            reasons.append(f"{kind}: {', '.join(missing) + ' is missing' if missing else 'not root'}")
            return None
        what = f"-t tmpfs -o size={megabytes}m none"
        if kind == "ext4":
            image = directory / "image"
            with image.open("wb") as file:
                file.truncate(megabytes << 20)
            # No blocks reserved for root, who would otherwise never find it full.
            made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True)
            if made.returncode:
                reasons.append(f"ext4: {made.stderr.decode().strip()}")
                return None
            what = f"-o loop {image}"
        apart = ["--mount"] if root else ["--user", "--map-root-user", "--mount"]
        holder = subprocess.Popen(
            ["unshare", *apart, "sh", "-c", f"mount {what} '{mount}' && echo mounted && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdout is not None
        if holder.stdout.readline() != b"mounted\n":
            _, errors = holder.communicate()
            reasons.append(f"{kind}: {errors.decode().strip()}")
            return None
        enter = ["--mount"] if root else ["--user", "--preserve-credentials", "--mount"]
        return cls(kind, mount, holder, ["nsenter", "--target", str(holder.pid), *enter, "--"])

    def outside(self, name: str) -> str:
        """The path of a file on it, for processes that are not inside."""
        return os.path.join(os.path.dirname(self._filler), name)

    def free_bytes(self) -> int:
        """What others than root could still write."""
        found = os.statvfs(os.path.dirname(self._filler))
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int) -> None:
        """Takes the space until so much is left."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            step = _STEP_BYTES
            while step >= 4096 and self.free_bytes() > leave_bytes:
                size = min(step, self.free_bytes() - leave_bytes)
                try:
                    os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, max(size, 1))
                except OSError:  # full; smaller pieces may still fit
                    step //= 4
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Gives it back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._filler)

    def close(self) -> None:
        """Lets go of the namespace; the kernel unmounts when the last process inside has ended."""
        self._holder.communicate()

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
