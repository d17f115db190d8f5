"""A container with three models in memory that holds two."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.container.stages.containers import Stage, started, volume

NAMES = ("alpha", "beta", "gamma")
# The first plan of 2,048 tokens holds about 600 MiB with the caches that it may grow, one beside it about 300.
LIMIT = "1000m"
FILE = "tune: off\nmodels:\n" + "".join(f"  {name}: {{model: {name}.gguf, ctx_size: 2048}}\n" for name in NAMES)


@contextmanager
def three_in_memory_for_two(host_port: int | None = None) -> Iterator[Stage]:
    """Yield the container once its first model, alpha, is ready."""
    with volume() as name:
        with started(name, env={"APPLIANCE_TUNE": "off"}) as maker:
            maker.wait_ready()
            maker.run("sh", "-c", "cd /data/models && for n in alpha beta gamma; do cp *Q4_1.gguf $n.gguf; done")
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w") as tar:
                info = tarfile.TarInfo("appliance.yaml")
                info.size, info.mode = len(FILE), 0o644
                tar.addfile(info, io.BytesIO(FILE.encode()))
            maker.container.put_archive("/data", archive.getvalue())
        with started(name, host_port=host_port, mem_limit=LIMIT, memswap_limit=LIMIT) as served:
            served.wait_ready()
            yield served
