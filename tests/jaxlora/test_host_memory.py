"""The memory of the host that this process may still take."""

import pytest

from jaxlora.common.host_memory import available_bytes

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 700 kB\nHugePages: 0\n"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 700 * 1024),  # caches of files count
        ({"sys/fs/cgroup/memory.max": "max\n"}, 700 * 1024),
        (  # a container sees its own group as the root
            {
                "proc/self/cgroup": "0::/docker/1\n",
                "sys/fs/cgroup/memory.max": "5000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
                "sys/fs/cgroup/memory.stat": "anon 3000\ninactive_file 900\n",
            },
            1900,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a/b\n0::/\n",
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "6000\n",
            },
            0,
        ),
        (  # the process is in a group of its job, which has the limit
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/step/memory.current": "100\n",
                "sys/fs/cgroup/job/memory.max": "5000\n",
                "sys/fs/cgroup/job/memory.current": "4000\n",
            },
            1000,
        ),
    ],
)
def test_what_is_left(tmp_path, files, wanted):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert available_bytes(tmp_path) == wanted


def test_of_this_machine():
    assert available_bytes() > 2**20
