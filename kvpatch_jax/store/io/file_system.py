"""Refusal of file systems that lack what the store relies on: locks of folders that all its processes see."""

import contextlib
import errno
import fcntl
import os

from ...errors import StoreIOError

NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "ocfs2"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.juicefs"),
)
"""Types that several machines may have mounted at once; their kernels do not see each other's locks of folders."""


def expect_local(folder: str) -> None:
    """Raises if a folder is on a file system of the network, or on one whose folders cannot be locked.

    Raises:
      StoreIOError: with the type, and what to use instead.
    """
    found = type_of(folder)
    why = f"a root on {found}" if found in NETWORK else _lock_error(folder)
    if why:
        raise StoreIOError(
            f"store {folder}: got {why}; expected a local file system: processes order their writes by locks of "
            "folders, and keep an index in shared memory. Machines share objects by a remote store, such as "
            "`open_remote('file:///shared/folder/')`"
        )


def type_of(folder: str) -> str:
    """Returns the type of a folder's file system, such as "ext4"; "" if the system does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in lines:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                return rest.split()[0]
    return ""


def _lock_error(folder: str) -> str:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # somebody has it, so it can be had
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EISDIR):
            return f"a folder that cannot be locked ({error.strerror})"
        raise
    finally:
        os.close(fd)
    return ""
