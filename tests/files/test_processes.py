"""Pools of processes, and clusters: what is left of them, and said, when one side is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from conftest import ROOT

from ckptool.base.errors import EngineError

#: A pool whose processes have all worked, and wait for more when their parent is killed.
KILLED = """
import os, sys, time
from ckptool.files.processes import ProcessPool
pool = ProcessPool(3)
for future in [pool.submit(time.sleep, 0.1) for _ in range(9)]:
    future.result()
os.write(1, b"done")
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_processes_end_with_a_parent_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # It ends when nobody has its output open any more: a process that lived on would hold it.
    words = [sys.executable, "-c", KILLED]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=False, timeout=300)
    assert done.stdout == b"done"
    assert done.returncode == -9


def test_a_connection_that_breaks_is_a_scheduler_that_was_lost() -> None:
    pytest.importorskip("distributed")
    from distributed.comm import CommClosedError

    from ckptool.files.cluster import Cluster

    class Broken:
        async def _result(self) -> None:
            raise CommClosedError("Stream is closed")

    client = SimpleNamespace(
        nthreads=lambda: {"worker": 1},
        loop=SimpleNamespace(add_callback=lambda *call: None),
        submit=lambda *call, pure: Broken(),
    )
    cluster = Cluster(client, "tcp://10.0.0.1:8786", ExitStack())
    future = cluster.submit(len, "")
    asyncio.run(cluster._pass_on(future, Broken()))
    with pytest.raises(EngineError, match=r"the scheduler at tcp://10\.0\.0\.1:8786 was lost"):
        future.result(1)
